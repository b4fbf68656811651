"""Dataset rows -> prompts -> token ids.

``read_prompts`` gives the prompts of a dataset, ``load_template`` what turns them into ids and ids into text.
"""

from pipeline.prompts.prompts import read_prompts
from pipeline.prompts.template import PromptTemplate, load_template

__all__ = ["PromptTemplate", "load_template", "read_prompts"]

"""EAGLE-3 training data: a target model's own answers, with its own token distributions.

The modules, from the top of the import order to the bottom:

``cli``       the verbs; the only module that knows Hydra
``run``       one run, read top to bottom: prompts -> engine -> client -> store
``export``    a run folder -> the files one trainer reads
``client``    one prompt -> one completion or one failure, over HTTP
``engine``    SGLang processes and what they report
``store``     the run folder: journal, shards, manifest
``prompts``   dataset rows -> prompts -> token ids
``records``, ``config``, ``errors``   plain types; they import nothing of ours
"""

__version__ = "0.1.0"

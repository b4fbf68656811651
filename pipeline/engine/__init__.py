"""SGLang processes: starting, watching, asking, and choosing between them."""

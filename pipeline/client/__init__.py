"""One prompt -> one completion or one failure, over HTTP."""

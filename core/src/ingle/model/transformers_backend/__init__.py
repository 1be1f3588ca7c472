"""Decoder-only models that the own decoder does not know, through transformers' modelling code.

``skeleton`` builds transformers' model without weights, ``probe`` finds out by one pass without
data how it attends, ``weights`` fills it by Ingle's loaders and kernels, ``model`` runs it on
Ingle's paged cache. transformers itself loads nothing, and no code of a checkpoint is ever run.
"""

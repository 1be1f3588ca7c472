"""AWQ checkpoints for Ingle. The entry point is ``ingle_quant_awq.plugin``."""

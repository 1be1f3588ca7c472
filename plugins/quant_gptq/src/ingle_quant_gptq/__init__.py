"""GPTQ checkpoints for Ingle. The entry point is ``ingle_quant_gptq.plugin``."""

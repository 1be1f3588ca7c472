"""Making EXL2 quants: layouts, adaptive GPTQ, measurement and the choice of bits."""

"""wfbp for frameworks above PyTorch: Lightning, Accelerate and Hugging Face's Trainer.

``lightning`` has a strategy, ``huggingface`` an accelerator and a trainer; each needs an extra of
its own and imports nothing of the other. Both are thin: gradients are averaged by
:func:`wfbp.torch.DistributedOptimizer`, all else by ``wfbp.torch``'s collectives.
"""

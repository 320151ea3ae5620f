"""wfbp within other frameworks: Lightning, Accelerate and Hugging Face's Trainer, and Ray.

``lightning`` has a strategy, ``huggingface`` an accelerator and a trainer, ``ray`` a function that
runs another one on ranks that Ray places; each needs an extra of its own and imports nothing of the
others. The first two are thin: gradients are averaged by :func:`wfbp.torch.DistributedOptimizer`,
all else by ``wfbp.torch``'s collectives. ``ray`` needs the launcher alone.
"""

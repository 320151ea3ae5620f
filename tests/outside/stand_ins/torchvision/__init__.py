"""Data sets, transforms and a model by torchvision's names: small, and made up."""

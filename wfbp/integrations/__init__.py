"""wfbp within Lightning, Accelerate and Hugging Face's Trainer, and Ray; each needs an extra."""

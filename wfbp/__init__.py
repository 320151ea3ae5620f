"""wfbp: data-parallel training whose gradients travel while backward still computes."""

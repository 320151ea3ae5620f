"""The command line: ``wfbp plan | simulate | probe | report``, one module per command."""

"""What measuring needs on a borrowed host without network, in one folder: ``kernels-bench bundle``."""

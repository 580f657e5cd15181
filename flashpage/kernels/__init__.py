"""The kernels: what each accepts, its tiles and costs, and the choice among them."""

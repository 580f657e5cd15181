from stand_in import install

__version__ = "0.0"

install(
    *("torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"),
    *("torchvision.transforms.v2", "torchvision.transforms.v2.functional"),
)

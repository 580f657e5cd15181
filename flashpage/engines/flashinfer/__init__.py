"""flashpage in FlashInfer's place, for programs whose imports cannot be changed."""

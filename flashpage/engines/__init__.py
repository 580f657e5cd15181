"""Where flashpage meets other people's engines: a folder each."""

"""What every room uses: element types, errors, environment variables, paths, and checks of single arguments."""

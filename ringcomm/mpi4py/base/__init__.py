"""What all of it uses: constants, errors, handles, options, infos and attributes."""

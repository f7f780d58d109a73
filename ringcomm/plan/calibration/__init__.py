"""The constants of a device: fitted to measured steps, or measured on this machine."""

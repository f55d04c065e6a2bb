"""The SDK against a whole service. The folder is a package so that its service ends after its last test."""

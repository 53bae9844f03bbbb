"""What ships inside the package: the model `tiny`, its data sets, and the script that wrote their text."""

"""The method of Gong et al. (2024) as plain Python: the specification that every implementation is tested against."""

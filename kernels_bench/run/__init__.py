"""Measuring: points checked and timed one after another, and a journal that has each as it is done."""

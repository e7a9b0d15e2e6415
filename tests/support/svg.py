"""Reads a chart."""

import re


def texts(svg):
    return [text.text for text in svg.iter("text")]


def numbers(path):
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def of_class(svg, name):
    return [each for each in svg.iter() if name in each.get("class", "").split()]

"""A package as a user has it: functions that return modules, data and scores, right ones and others."""

from __future__ import annotations

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        hidden = torch.relu(self.norm(self.first(image)))
        return self.head(self.drop(hidden.mean((2, 3))))


def build():
    torch.manual_seed(3)
    return Net()


def fails():
    raise ValueError("no such width")


def nothing():
    return None


module = Net()
number = 3
"""

DATA = """
import torch


def calibration():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3])) for _ in range(3)]


def score(model):
    with torch.no_grad():
        return torch.cat([model(image).softmax(1).gather(1, label[:, None]) for image, label in calibration()]).mean()


def empty():
    return []


def none():
    return None


def wrong():
    return [{"picture": torch.ones(2, 3, 8, 8)}]


def small():
    return [torch.ones(2, 1, 8, 8)]


def broken():
    yield torch.ones(2, 3, 8, 8)
    raise OSError("disk gone")


def word(model):
    return "good"


def silent(model):
    model(torch.ones(2, 3, 8, 8))


def endless(model):
    return float("nan")


def raises(model):
    raise KeyError("label")
"""

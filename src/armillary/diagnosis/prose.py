"""English prose to try a model on, written for this purpose."""

PROSE = """\
The river rises in the hills to the north and runs for about forty miles before it reaches the \
sea. In spring the snow melts and the water is high; by August it is often possible to walk across \
on the stones. People have lived along its banks for a very long time. They built their houses on \
the higher ground, kept sheep and a few cows, and went down to the water to fish and to wash. A \
mill stood at the bend, where the current is strongest, and the farmers brought their grain there \
after the harvest.

When the railway came, most of this changed. The line followed the valley, because that was the \
only level way through the hills, and a station was built beside the mill. Grain could now be sent \
to the town in a morning, and within ten years the mill had closed. The miller's son became the \
first stationmaster. He is said to have kept a clock in the window of his office, set by the \
telegraph every day at noon, so that the whole village could see what time it was. Before that, \
each house had kept its own time, and nobody had been much troubled by the difference.

The school was built in the same years. It had one room, with a stove in the middle and benches \
along the walls, and the children came from farms as far as five miles away. In winter those who \
lived nearest arrived first and lit the fire, so that the room would be warm when the others came. \
They learned to read, to write and to count, and on Friday afternoons they sang. Some of the older \
boys stayed away during the harvest, and the teacher, who knew their parents, did not complain. In \
the evenings she wrote down what the old people told her: where the ford had been, which fields \
had flooded, how many sheep were lost in the great snow, and what the names of the hills meant.

Today the station is closed as well, and the line has been made into a path for walkers and \
bicycles. The clock still hangs in the window, although it stopped many years ago. If you follow \
the path for an hour, you come to a small bridge of stone. It is older than the railway and older \
than the mill, and it was made without mortar, by people who fitted each stone to the next so well \
that water and frost have not moved them since. There is a good view from the middle of it. On one \
side you can see the hills, and on the other, when the air is clear, a thin bright line that is \
the sea.
"""

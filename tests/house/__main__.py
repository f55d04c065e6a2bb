"""Measure how easily people find their way in a tree: `python -m tests.house [--tree DIR] [--no-paths]`.

Prints figures for this tree or for another checkout, so that two can be compared. The figures are the files on the path
of three requests (traced in a service), the files that name a given loss or optimizer, class names used twice, and long
classes. They are also lines, imports, functions with undocumented parameters, and modules of the execution room without
a unit test.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.house import paths, source

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to look at [default: this one]")
    parser.add_argument("--no-paths", action="store_true", help="leave out the traced requests (a minute)")
    given = parser.parse_args()
    tree = given.tree.resolve()
    if not given.no_paths:
        for operation, files in paths.trace(tree).items():
            print(f"files on the path of {operation}: {len(files)}")
            for file in files:
                print(f"    {file}")
    for change, files in source.files_that_name(tree).items():
        print(f"files that name {change}: {len(files)}  ({', '.join(files)})")
    twice = source.class_names_used_twice(tree)
    print(f"class names used twice: {len(twice)}  ({', '.join(sorted(twice))})")
    print(f"lines outside tests: {source.lines_outside_tests(tree)}; of tests: {source.lines_of_tests(tree)}")
    for name, lines in source.long_classes(tree).items():
        print(f"a class over 250 lines: {name} ({lines})")
    for folder, (count, arrows, circles) in source.rooms(tree).items():
        print(f"{folder}: {count} modules, {arrows} arrows" + (f", {circles} circles" if circles else ""))
    bare = source.undocumented(tree)
    print(f"functions with five or more parameters that leave some undocumented: {len(bare)}")
    print(f"modules of the execution room without a unit test: {', '.join(source.untested(tree)) or 'none'}")


if __name__ == "__main__":
    main()

"""``python -m meshwright``: the command line, where its script is not on the path."""

from meshwright.cli import app

if __name__ == "__main__":
    app(prog_name="meshwright")

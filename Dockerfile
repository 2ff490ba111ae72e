# The two commands in a clean machine:  docker build -t quantizer . && docker run --rm quantizer [make test]
FROM python:3.11-slim

# make runs the two commands, and a C++ compiler lets torch compile engines.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*

WORKDIR /quantizer

# What is installed changes more rarely than the code: the layer with the packages is kept until then.
COPY pyproject.toml constraints.txt requirements-no-deps.txt Makefile README.md LICENSE CHANGELOG.md ./
COPY quantizer/__init__.py quantizer/__init__.py
RUN make .venv/.installed

COPY . .
# The files are newer now, and what is installed is the same.
RUN touch .venv/.installed

CMD ["make", "demo"]

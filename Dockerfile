# Lockstep with MLX for CPUs, for development: see docker-compose.dev.yml.
FROM python:3.13-slim

WORKDIR /opt/lockstep
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY services services
COPY shared shared
COPY models models
RUN pip install --no-cache-dir --disable-pip-version-check . --constraint constraints.txt

# Volumes that are mounted here begin with this owner and mode.
RUN useradd --system --uid 10001 --create-home lockstep \
    && install -d -o lockstep -g lockstep -m 0700 /bus /blocks /run/lockstep
USER lockstep
WORKDIR /home/lockstep
ENV PYTHONUNBUFFERED=1 LOCKSTEP_PATHS_RUN_DIR=/run/lockstep

ENTRYPOINT ["lockstep"]
CMD ["up"]

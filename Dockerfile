# Both services, built once, each in an image of its own: an image is what is rolled out and rolled
# back, and orders and inventory are rolled out apart. What they share, the base layers and the build,
# is shared by the cache anyway.
#
#   docker build --target orders -t orders-service .
#   docker build --target inventory -t inventory-service .

FROM rust:1.95-slim-trixie AS build
WORKDIR /src
ENV SQLX_OFFLINE=true
COPY . .
# Compiled dependencies stay in a cache mount, not in layers made of stub sources: a new Cargo.lock
# then compiles what changed in it, not everything anew. The mounts need BuildKit and nothing newer.
#
# `touch`: in a kept target/ cargo compares times, and sources come with the times of the checkout,
# which may be older than what was built from another branch; and a new migration, or a new file in
# .sqlx, is no change of any source at all. So the crates of this workspace are always compiled, which
# also is all that a build does when no dependency changed.
RUN --mount=type=cache,id=cargo-registry,target=/usr/local/cargo/registry \
    --mount=type=cache,id=orders-inventory-target,target=/src/target,sharing=locked \
    mkdir -p e2e/src && touch e2e/src/lib.rs && \
    find . -path ./target -prune -o -name '*.rs' -exec touch {} + && \
    cargo build --locked --release -p orders-service -p inventory-service && \
    install -D -t /out target/release/orders-service target/release/inventory-service

# Debian rather than a bare image: bash in it is what the health check in docker-compose.yml speaks
# HTTP with, and what a person gets by `docker compose exec`. TLS roots are in the binaries.
FROM debian:trixie-slim AS runtime
USER 10001:10001
STOPSIGNAL SIGTERM

# The ports are those of the defaults; the address is not: 127.0.0.1 in a container is heard by nobody.
FROM runtime AS orders
ENV HTTP_LISTEN=0.0.0.0:8080 OPS_LISTEN=0.0.0.0:9080
EXPOSE 8080 9080
COPY --from=build /out/orders-service /usr/local/bin/
ENTRYPOINT ["orders-service"]

FROM runtime AS inventory
ENV HTTP_LISTEN=0.0.0.0:8081 OPS_LISTEN=0.0.0.0:9081
EXPOSE 8081 9081
COPY --from=build /out/inventory-service /usr/local/bin/
ENTRYPOINT ["inventory-service"]

"""What a test knows of a server: where it is and how the drivers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.stores.child import HOST

BUCKET = "checkpoints"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, with an empty bucket."""

    name: str
    protocol: str
    """Of URLs: `s3`, `az`, `gs`."""
    endpoint: str
    """Where it listens: `http://127.0.0.1:PORT`."""
    options: Mapping[str, Any]
    """`storage_options` that reach it."""
    environment: Mapping[str, str]
    """Environment variables by which the driver finds it without options."""
    bucket: str = BUCKET
    settings: str = ""
    """The file of settings by which a program administers it; only Ceph's."""

    def url(self, folder: str) -> str:
        """The URL of a folder in the bucket."""
        return f"{self.protocol}://{self.bucket}/{folder}"

    def at(self, endpoint: str) -> Server:
        """The same server by another address: that of a proxy in front of it."""

        def moved(value: Any) -> Any:
            return value.replace(self.endpoint, endpoint) if isinstance(value, str) else value

        return replace(
            self,
            endpoint=endpoint,
            options={key: moved(value) for key, value in self.options.items()},
            environment={key: moved(value) for key, value in self.environment.items()},
        )


def s3_server(name: str, port: int, key: str, secret: str) -> Server:
    """An S3 server on a port of this machine; its bucket is made here."""
    endpoint = f"http://{HOST}:{port}"
    server = Server(
        name,
        "s3",
        endpoint,
        {
            "key": key,
            "secret": secret,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": REGION},
        },
        {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_DEFAULT_REGION": REGION,
        },
    )
    s3_client(server).create_bucket(Bucket=server.bucket)
    return server


def s3_client(server: Server) -> Any:
    """A client of another library than the drivers', to make buckets and to look; tries once."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.options["key"],
        aws_secret_access_key=server.options["secret"],
        region_name=REGION,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            response_checksum_validation="when_required",
        ),
    )

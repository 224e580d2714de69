"""Keys and certificates for tests of TLS, made when they are needed: none of them is of any worth."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def curve_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def rsa_key() -> Key:
    return rsa.generate_private_key(65537, 2048)


@dataclass(frozen=True)
class Pair:
    """A certificate of 127.0.0.1 and its key."""

    key: Key
    certificate: x509.Certificate

    @property
    def encoded(self) -> bytes:
        """The certificate as the other side of a connection is shown it."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def write(self, folder: Path, name: str) -> Path:
        """Makes NAME.key and NAME.crt, each of them in one moment; the certificate's path."""
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        replace(folder / f"{name}.key", key)
        return replace(folder / f"{name}.crt", self.certificate.public_bytes(serialization.Encoding.PEM))


def replace(path: Path, data: bytes) -> Path:
    made = path.with_name(f"{path.name}.new")
    made.write_bytes(data)
    return made.replace(path)


def make_pair(name: str, key: Key, issuer: Pair | None = None) -> Pair:
    """A certificate that `issuer` signs; without one an authority's own."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer = key if issuer is None else issuer.key
    now = datetime.datetime.now(datetime.UTC)
    uses = {use: use == "digital_signature" or (issuer is None and use == "key_cert_sign") for use in _USES}
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**uses), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return Pair(key, certificate)

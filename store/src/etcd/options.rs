//! Where an etcd is, and with which certificates it is asked.

use crate::StoreError;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// The certificates of mutual TLS, PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The authority that signed the members' certificates.
    pub authority: PathBuf,
    /// This host's certificate, with those between it and the authority.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// The members of an etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdOptions {
    /// HOST:PORT of each.
    members: Vec<String>,
    tls: Option<TlsFiles>,
}

const SCHEME: &str = "etcd://";
const MEMBERS_MAX: usize = 16;

impl EtcdOptions {
    /// From `etcd://HOST:PORT[,HOST:PORT…]`. Without certificates only members on this
    /// host's loopback are accepted: the cluster's state crosses no network in the clear.
    pub fn parse(url: &str, tls: Option<TlsFiles>) -> Result<EtcdOptions, StoreError> {
        let wrong = |reason: &str| {
            Err(StoreError::Options {
                what: format!("the store {url:?}"),
                reason: reason.into(),
            })
        };
        let Some(list) = url.strip_prefix(SCHEME) else {
            return wrong("write etcd://HOST:PORT, with commas between several members");
        };
        let members: Vec<String> = list
            .trim_end_matches('/')
            .split(',')
            .map(String::from)
            .collect();
        if members.len() > MEMBERS_MAX {
            return wrong("give 16 members or less");
        }
        for member in &members {
            let Some((host, port)) = member.rsplit_once(':') else {
                return wrong("a member has no port: write HOST:PORT (etcd's own port is 2379)");
            };
            let fine = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
            if host.is_empty() || !host.chars().all(fine) {
                return wrong("a member's host is empty or has a character that no host name has");
            }
            if !port.parse::<u16>().is_ok_and(|port| port > 0) {
                return wrong("a member's port is not between 1 and 65535");
            }
            if tls.is_none() && !is_loopback(host) {
                return wrong(
                    "an etcd on another host needs certificates: give an authority, a \
                     certificate and a key",
                );
            }
        }
        Ok(EtcdOptions { members, tls })
    }

    pub(super) fn urls(&self) -> Vec<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        self.members
            .iter()
            .map(|member| format!("{scheme}://{member}"))
            .collect()
    }

    pub(super) fn tls(&self) -> Result<TlsConfig, StoreError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = TlsConfig::builder().unversioned_rustls_crypto_provider(provider);
        let Some(files) = &self.tls else {
            return Ok(builder.build());
        };
        let authority = certificates(&files.authority)?;
        let chain = certificates(&files.certificate)?;
        let key = PrivateKey::from_pem(&read(&files.key)?)
            .map_err(|error| wrong(&files.key, &format!("has no private key: {error}")))?;
        Ok(builder
            .root_certs(RootCerts::new_with_certs(&authority))
            .client_cert(Some(ClientCert::new_with_certs(&chain, key)))
            .build())
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || address
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

fn wrong(file: &Path, reason: &str) -> StoreError {
    StoreError::Options {
        what: file.display().to_string(),
        reason: reason.into(),
    }
}

fn read(file: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(file).map_err(|error| wrong(file, &format!("cannot be read: {error}")))
}

fn certificates(file: &Path) -> Result<Vec<Certificate<'static>>, StoreError> {
    let mut found = Vec::new();
    for item in parse_pem(&read(file)?) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(wrong(file, &format!("is no PEM file: {error}"))),
        }
    }
    if found.is_empty() {
        Err(wrong(file, "has no certificate"))
    } else {
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read() {
        let options = EtcdOptions::parse("etcd://127.0.0.1:2379,localhost:22379", None).unwrap();
        assert_eq!(
            options.urls(),
            ["http://127.0.0.1:2379", "http://localhost:22379"]
        );
        assert!(EtcdOptions::parse("etcd://[::1]:2379", None).is_ok());
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (url, says) in [
            ("redis://x:1", "write etcd://"),
            ("etcd://alpha", "no port"),
            ("etcd://:1", "host is empty"),
            ("etcd://a/b:1", "no host name has"),
            ("etcd://localhost:0", "port"),
            ("etcd://alpha:2379", "needs certificates"),
        ] {
            let error = EtcdOptions::parse(url, None).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let missing = TlsFiles {
            authority: "/nonexistent/ca".into(),
            certificate: "/nonexistent/c".into(),
            key: "/nonexistent/k".into(),
        };
        let options = EtcdOptions::parse("etcd://alpha:2379", Some(missing)).unwrap();
        let error = options.tls().unwrap_err().to_string();
        assert!(
            error.starts_with("/nonexistent/ca: cannot be read"),
            "{error}"
        );
    }
}

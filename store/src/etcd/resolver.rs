//! Where a member is. ureq looks names up in a thread, to bound the wait; a thread that is new can
//! wait for more than a second on a busy host. An address needs neither.

use std::net::SocketAddr;

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

#[derive(Debug, Default)]
pub(super) struct AddressOrName(DefaultResolver);

impl Resolver for AddressOrName {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        match address(uri) {
            Some(address) => {
                let mut resolved = self.empty();
                resolved.push(address);
                Ok(resolved)
            }
            None => self.0.resolve(uri, config, timeout),
        }
    }
}

/// The address that stands in the place of a host name, with its port.
fn address(uri: &Uri) -> Option<SocketAddr> {
    uri.authority()?.as_str().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_lookup() {
        let of = |text: &str| address(&text.parse().unwrap());
        for address in ["127.0.0.1:2379", "[::1]:2379"] {
            assert_eq!(
                of(&format!("https://{address}/v3/kv/range")),
                address.parse().ok()
            );
        }
        for name in [
            "http://etcd-1:2379/",
            "http://127.0.0.1/",
            "http://1.2.3:4/",
        ] {
            assert_eq!(of(name), None, "{name}");
        }
    }
}

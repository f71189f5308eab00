//! `weft cluster serve` and `weft cluster store`.

use std::sync::Arc;

use anyhow::Context;
use weft_node::member::Membership;
use weft_node::rundir;
use weft_store::{Embedded, TlsFiles};
use weft_web::{Gateway, Listen, Server};

use crate::args::{ServeArgs, StoreServeArgs};

/// The server's socket, in the run directory.
const SOCKET: &str = "web.sock";

/// `weft cluster serve`.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    let name = cluster.identity().name.clone();
    let path = match &args.socket {
        Some(path) => path.clone(),
        None => rundir::directory()?.join(SOCKET),
    };
    let tls = args.tls_certificate.clone().zip(args.tls_key.clone());
    let listen = Listen {
        address: args.listen,
        tls,
    };
    let server = Server::bind(cluster, &path, &listen)?;
    eprintln!(
        "weft: serves the cluster {name}, at {} without a key; this link has one that is good as \
         long as this command runs:",
        path.display()
    );
    println!("{}", server.link()?);
    server.run(std::future::pending())?;
    Ok(())
}

/// `weft cluster store`.
pub fn store(args: &StoreServeArgs) -> anyhow::Result<()> {
    let files = args.store_authority.clone();
    let files = files.zip(args.store_certificate.clone().zip(args.store_key.clone()));
    let tls = files.map(|(authority, (certificate, key))| TlsFiles {
        authority,
        certificate,
        key,
    });
    let store = Arc::new(Embedded::open(&args.file)?);
    let gateway = Gateway::bind(store, args.listen, tls.as_ref())?;
    eprintln!(
        "weft: serves {} as the store etcd://{}, until this command is ended",
        args.file.display(),
        gateway.address().context("it listens")?
    );
    gateway.run(std::future::pending())?;
    Ok(())
}

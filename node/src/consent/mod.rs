//! What a lender lets the slices of a peer open on its host: disks and networks,
//! nothing unless `node.toml` says so.
//!
//! ```toml
//! disks = ["/srv/weft/root.img,ro", "/dev/vdb,rw", "/srv/weft/beta/,rw"]
//! networks = ["user", "user,loopback,forward=2222", "tap=tap0", "switch=/run/weft/switch", "switch=mpi"]
//! ```
//!
//! A path with `/` at its end is a directory: it stands for the regular files
//! beneath it. The daemon resolves symbolic links in these paths once, when it starts.
//! From then on no link is followed: a slice opens what it was permitted with
//! openat2(2) and RESOLVE_NO_SYMLINKS, as a path without `..`, so that nothing that is
//! renamed or linked meanwhile leads it elsewhere, and looks at what it has opened. It
//! opens with the rights of the peer's user.
//!
//! The daemon hands a slice its [`Lender`] beside what its launcher says; the slice's
//! monitor, which has executed nothing of the guest's yet, judges.
//!
//! - [`grant`]: an entry, and what it allows
//! - [`lender`]: what a slice may open, by all of them
//! - [`permitted`]: how it is opened

mod grant;
mod lender;
mod permitted;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::Wrong;
use grant::{DiskGrant, GrantError, NetworkGrant};

pub use lender::{Lender, Refused};
pub use permitted::{NewFile, Permitted};

/// Most disks, and most networks, of one peer.
pub const GRANTS_MAX: usize = 64;
/// Limit of the total length of a peer's grants, as text: one packet carries them to a
/// slice.
pub const GRANTS_BYTES_MAX: usize = 16 << 10;

/// All that a peer's slices may open.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consent {
    disks: Vec<DiskGrant>,
    networks: Vec<NetworkGrant>,
}

impl Consent {
    /// Reads what the configuration says.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn parse(disks: &[String], networks: &[String]) -> Result<Consent, Wrong> {
        for (field, entries) in [("peer.disks", disks), ("peer.networks", networks)] {
            if entries.len() > GRANTS_MAX {
                return Err((field, format!("more than {GRANTS_MAX} entries")));
            }
        }
        let bytes: usize = disks.iter().chain(networks).map(String::len).sum();
        if bytes > GRANTS_BYTES_MAX {
            let why = format!("more than {GRANTS_BYTES_MAX} bytes, `networks` included");
            return Err(("peer.disks", why));
        }
        let wrong = |field, text: &str, why: GrantError| (field, format!("`{text}`: {why}"));
        let disks = disks
            .iter()
            .map(|text| DiskGrant::parse(text).map_err(|why| wrong("peer.disks", text, why)));
        let networks = networks
            .iter()
            .map(|text| NetworkGrant::parse(text).map_err(|why| wrong("peer.networks", text, why)));
        Ok(Consent {
            disks: disks.collect::<Result<_, _>>()?,
            networks: networks.collect::<Result<_, _>>()?,
        })
    }

    /// Resolves symbolic links in the paths of disks, now; the paths of those that are
    /// not there.
    pub fn resolve(&mut self) -> Vec<PathBuf> {
        let mut absent = Vec::new();
        for disk in &mut self.disks {
            match disk.path.canonicalize() {
                Ok(real) => disk.real = real,
                Err(_) => absent.push(disk.path.clone()),
            }
        }
        absent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn lender(disks: &[&str], networks: &[&str]) -> Lender {
        let owned = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| text.to_string())
                .collect::<Vec<_>>()
        };
        Lender {
            peer: "beta".into(),
            consent: Consent::parse(&owned(disks), &owned(networks)).unwrap(),
        }
    }

    #[test]
    fn nothing_is_allowed_unless_it_is_said() {
        let nothing = lender(&[], &[]);
        let error = nothing.disk(Path::new("/srv/a.img"), true).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the lender does not allow this disk; to allow it, write `disks = [\"/srv/a.img,rw\"]` into \
             the [[peer]] `beta` of the lender's node.toml, and start its daemon again"
        );
        let error = nothing.user_network(true, &[80, 81]).unwrap_err();
        let line = "networks = [\"user,loopback,forward=80,forward=81\"]";
        assert!(error.to_string().contains(line), "{error}");
        let error = nothing.tap("t0").unwrap_err().to_string();
        assert!(error.contains("networks = [\"tap=t0\"]"), "{error}");
    }

    #[test]
    fn what_a_refusal_says_to_write_is_what_allows_it() {
        let allowed = lender(
            &["/srv/a.img,rw"],
            &["user,loopback,forward=80,forward=81", "tap=t0"],
        );
        allowed.disk(Path::new("/srv/a.img"), true).unwrap();
        allowed.user_network(true, &[80, 81]).unwrap();
        allowed.tap("t0").unwrap();
    }

    #[test]
    fn reading_is_not_writing() {
        let lender = lender(&["/srv/a.img,ro", "/srv/b/,ro", "/srv/b/own/,rw"], &[]);
        let may = |path: &str, write| lender.disk(Path::new(path), write);
        assert!(may("/srv/a.img", false).is_ok());
        let error = may("/srv/a.img", true).unwrap_err().to_string();
        assert!(error.contains("`ro` opens it for reading"), "{error}");
        assert!(may("/srv/b/x", false).is_ok() && may("/srv/b/x", true).is_err());
        assert!(may("/srv/b/own/x", true).is_ok());
    }

    #[test]
    fn only_what_lies_beneath_is_beneath() {
        let lender = lender(&["/srv/b/,rw", "/srv/a.img,rw"], &[]);
        for path in [
            "/srv/b",
            "/srv/b/",
            "/srv/bb",
            "/srv/b/../a",
            "/srv/b/x/../../../etc/shadow",
            "/srv/a.img/x",
            "/srv",
            "/",
            "",
            "srv/b/x",
            "../srv/b/x",
        ] {
            assert!(lender.disk(Path::new(path), false).is_err(), "{path}");
        }
        for path in ["/srv/b/x", "/srv/b//./x/y", "/srv/./a.img"] {
            assert!(lender.disk(Path::new(path), true).is_ok(), "{path}");
        }
    }

    #[test]
    fn a_switch_is_allowed_by_its_socket() {
        let lender = lender(&[], &["switch=/run/weft/a,b", "user"]);
        lender.switch(Path::new("/run/weft/a,b")).unwrap();
        lender.switch(Path::new("/run//weft/./a,b")).unwrap();
        for path in ["/run/weft/a", "/run/weft", "/run/weft/x/../a,b", "a,b", ""] {
            let error = lender.switch(Path::new(path)).unwrap_err().to_string();
            let line = format!("networks = [\"switch={path}\"]");
            assert!(error.contains(&line), "{error}");
        }
    }

    #[test]
    fn a_switch_is_allowed_by_its_name() {
        let lender = lender(&[], &["switch=mpi", "switch=/run/weft/other"]);
        lender.named_switch("mpi").unwrap();
        for name in ["other", "mpi2", "", "/run/weft/other"] {
            let error = lender.named_switch(name).unwrap_err().to_string();
            let line = format!("networks = [\"switch={name}\"]");
            assert!(error.contains(&line), "{error}");
        }
        assert!(lender.switch(Path::new("mpi")).is_err());
    }

    #[test]
    fn one_entry_has_to_allow_the_whole_network() {
        let lender = lender(
            &[],
            &["user,loopback", "user,forward=80-90,forward=2222", "tap=t0"],
        );
        assert!(lender.user_network(false, &[]).is_ok());
        assert!(lender.user_network(true, &[]).is_ok());
        assert!(lender.user_network(false, &[80, 90, 2222]).is_ok());
        assert!(lender.user_network(false, &[91]).is_err());
        assert!(lender.user_network(true, &[80]).is_err());
        assert!(lender.tap("t0").is_ok() && lender.tap("t1").is_err());
        assert!(lender.tap("t").is_err() && lender.tap("").is_err());
    }

    #[test]
    fn entries_that_make_no_sense_are_refused() {
        let disk = |text: &str| Consent::parse(&[text.into()], &[]).unwrap_err();
        let network = |text: &str| Consent::parse(&[], &[text.into()]).unwrap_err();
        for text in ["/srv/a.img", "/srv/a.img,", "/srv/a.img,rx"] {
            assert!(disk(text).1.contains("FILE,ro or FILE,rw"), "{text}");
        }
        for text in ["a.img,ro", "/srv/../etc/,ro", ",ro"] {
            assert!(disk(text).1.contains("absolute path"), "{text}");
        }
        for text in ["", "tap", "tap=", "tap=t,loopback", "users", "switch"] {
            assert!(
                network(text)
                    .1
                    .contains("tap=NAME, switch=NAME, switch=PATH or user"),
                "{text}"
            );
        }
        for text in ["switch=", "switch=s.d", "switch=./s", "switch=/run/../s"] {
            assert!(network(text).1.contains("absolute path"), "{text}");
        }
        for text in [
            "user,forward=",
            "user,forward=0",
            "user,forward=9-8",
            "user,forward=1:2",
        ] {
            assert!(network(text).1.contains("is not a port"), "{text}");
        }
        assert!(network("user,all").1.contains("`all`"));
        let many = vec!["user".to_owned(); GRANTS_MAX + 1];
        assert!(
            Consent::parse(&[], &many)
                .unwrap_err()
                .1
                .contains("more than")
        );
        let long = format!("/{},ro", "x".repeat(GRANTS_BYTES_MAX));
        assert!(disk(&long).1.contains("more than"));
    }

    /// A directory with a disk, a secret outside, and ways from one to the other.
    fn site(name: &str) -> (PathBuf, Lender) {
        let top = std::env::temp_dir().join(format!("weft-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&top);
        let inside = top.join("real/b/deep");
        fs::create_dir_all(&inside).unwrap();
        fs::write(inside.join("disk"), "disk").unwrap();
        fs::write(top.join("secret"), "secret").unwrap();
        symlink("real", top.join("way")).unwrap();
        symlink("../../secret", top.join("real/b/link")).unwrap();
        symlink("../..", top.join("real/b/up")).unwrap();
        symlink("secret", top.join("one")).unwrap();
        fs::hard_link(top.join("secret"), top.join("real/b/hard")).unwrap();
        let shown = top.display();
        let mut lender = lender(
            &[
                &format!("{shown}/way/b/,rw"),
                &format!("{shown}/one,ro"),
                &format!("{shown}/none,rw"),
            ],
            &[],
        );
        assert_eq!(lender.consent.resolve(), [top.join("none")]);
        (top, lender)
    }

    #[test]
    fn no_link_leads_out() {
        let (top, lender) = site("links");
        let open = |path: &str| {
            let path = top.join("way/b").join(path);
            lender.disk(&path, true).unwrap().open(libc::O_RDWR)
        };
        assert!(open("deep/disk").is_ok());
        let error = open("link").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        let error = open("up/secret").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        assert!(
            open("hard")
                .unwrap_err()
                .to_string()
                .contains("another hard link")
        );
        assert!(open("deep").is_err());
        // Links in the lender's own path were followed once, at the start.
        let one = lender.disk(&top.join("one"), false).unwrap();
        assert!(one.open(libc::O_RDONLY).is_ok());
        fs::remove_file(top.join("secret")).unwrap();
        symlink("real/b/hard", top.join("secret")).unwrap();
        let error = one.open(libc::O_RDONLY).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn renaming_between_check_and_opening_leads_nowhere_else() {
        let (top, lender) = site("renames");
        let wanted = lender.disk(&top.join("way/b/deep/disk"), true).unwrap();
        // Another takes the place of the directory: a link to where the secret is.
        fs::rename(top.join("real/b/deep"), top.join("real/b/away")).unwrap();
        symlink("../..", top.join("real/b/deep")).unwrap();
        fs::rename(top.join("secret"), top.join("disk")).unwrap();
        let error = wanted.open(libc::O_RDWR).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        // And of the file.
        fs::remove_file(top.join("real/b/deep")).unwrap();
        fs::create_dir(top.join("real/b/deep")).unwrap();
        fs::hard_link(top.join("disk"), top.join("real/b/deep/disk")).unwrap();
        assert!(wanted.open(libc::O_RDWR).is_err());
        fs::remove_dir_all(&top).unwrap();
    }
}

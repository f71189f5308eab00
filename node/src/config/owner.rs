//! Who can change a configuration.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::ConfigError;

/// Refuses a file or directory that a user other than this one and root can change:
/// its content decides which peers may borrow, and what.
pub fn check(path: &Path) -> Result<(), ConfigError> {
    let status = fs::metadata(path).map_err(|source| ConfigError::File {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    judge(path, &status)
}

/// The same of a file of a configuration and of its directory.
pub fn check_owner(directory: &Path, file: &Path) -> Result<(), ConfigError> {
    check(directory)?;
    check(file)
}

/// The same of what was opened.
pub fn judge(path: &Path, status: &fs::Metadata) -> Result<(), ConfigError> {
    judge_for(path, status, nix::unistd::geteuid().as_raw())
}

fn judge_for(path: &Path, status: &fs::Metadata, user: u32) -> Result<(), ConfigError> {
    let writable = |why: String, fix: String| {
        let path = path.to_owned();
        Err(ConfigError::Writable { path, why, fix })
    };
    let shown = path.display();
    let (owner, mode) = (status.uid(), status.mode() & 0o7777);
    if owner != user && owner != 0 {
        let why = format!("belongs to user {owner}");
        return writable(why, format!("chown {user} {shown}"));
    }
    if mode & 0o022 != 0 {
        let why = format!("has mode {mode:04o}, so others may write to it");
        return writable(why, format!("chmod go-w {shown}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CONFIG_FILE, Config, init, load_keys};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_others_can_change_is_refused() {
        let directory = std::env::temp_dir().join(format!("weft-modes-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        init(&directory).unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let file = directory.join(CONFIG_FILE);
        let refused = || {
            let error = Config::load(&directory).unwrap_err();
            assert!(matches!(error, ConfigError::Writable { .. }), "{error}");
            error.to_string()
        };
        for open in [0o666, 0o620, 0o602] {
            mode(&file, open);
            let error = refused();
            assert!(
                error.contains("chmod go-w") && error.contains(CONFIG_FILE),
                "{error}"
            );
        }
        mode(&file, 0o644);
        Config::load(&directory).unwrap();
        for open in [0o777, 0o770, 0o1777] {
            mode(&directory, open);
            assert!(!refused().contains(CONFIG_FILE));
            assert!(matches!(
                load_keys(&directory),
                Err(ConfigError::Writable { .. })
            ));
        }
        mode(&directory, 0o755);
        load_keys(&directory).unwrap();
        // As an ordinary user sees it that does not own the file.
        let status = fs::metadata(&file).unwrap();
        let other = status.uid() + 1;
        assert_eq!(judge_for(&file, &status, other).is_ok(), status.uid() == 0);
        fs::remove_dir_all(&directory).unwrap();
    }
}

//! What a launcher or daemon without free file descriptors leaves behind: nothing. The
//! limit holds for the whole process, so this test has one of its own.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::wait::{WaitPidFlag, waitpid};
use weft_node::spawn::{self, Ended, Executable, Role};

/// More descriptors than a start opens.
const DESCRIPTORS_MAX: u64 = 16;

fn open_descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

#[test]
fn a_process_that_cannot_be_watched_is_not_left_behind() {
    let executable = Executable::open(Path::new("/bin/true")).unwrap();
    let role = Role::Slice {
        name: "true",
        confinement: None,
        keeps_errors: true,
        group: None,
    };
    let (limit, limit_max) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let before = open_descriptors();
    let mut started = 0;
    for more in 0..DESCRIPTORS_MAX {
        setrlimit(Resource::RLIMIT_NOFILE, before + more, limit_max).unwrap();
        let process = spawn::start(&executable, &role);
        setrlimit(Resource::RLIMIT_NOFILE, limit, limit_max).unwrap();
        if let Ok(mut process) = process {
            let ended = process.end_within(Duration::from_secs(30)).unwrap();
            assert_eq!(ended, Ended::Exited(0));
            started += 1;
        }
        let child = waitpid(None, Some(WaitPidFlag::WNOHANG));
        assert_eq!(child, Err(Errno::ECHILD), "{more} descriptors");
        assert_eq!(open_descriptors(), before);
    }
    assert!((1..DESCRIPTORS_MAX).contains(&started), "{started}");
}

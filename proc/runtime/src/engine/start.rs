//! How an engine comes to be: at home by stretching a running program, on
//! another node as the whole life of the process.

use core::sync::atomic::Ordering;

use weft_pager::space::Space;
use weft_pager::uffd::Uffd;
use weft_proc::boot::{
    Boot, CONTROL_READY, CONTROL_STRETCHED, ControlMessage, EXIT_SETUP, LINK_RING, LINK_SEALED,
    LINK_STREAM, LinkSpec, MAX_NODES, ROLE_HOME,
};
use weft_proc::layout::{Layout, PAGE, REGIONS_MAX};
use weft_proc::message::Message;
use weft_wire::{Link, LinkConfig, LinkKind};

use super::io::Io;
use super::machine::{ENGINE, Engine, STRETCHED};
use super::{VDSO_HASH, beat, budget, clock, confine, jump, serve};
use crate::own_calls::{self, call};
use crate::{control, descriptors, intercept, log, signal, space, thread, vdso};

const O_RDWR_CLOEXEC: usize = 0o2_000_002;
const O_RDONLY_CLOEXEC: usize = 0o2_000_000;
const AT_FDCWD: isize = -100;

fn setup_failed(what: &str, error: impl core::fmt::Display) -> ! {
    log::fail(EXIT_SETUP, format_args!("{what}: {error}"))
}

/// A kept descriptor of a file of /proc/self; -1 where there is no /proc.
fn open_self(path: &core::ffi::CStr, flags: usize) -> i32 {
    let opened = call!(openat, AT_FDCWD, path.as_ptr(), flags, 0);
    opened
        .and_then(|fd| descriptors::keep(fd as i32))
        .unwrap_or(-1)
}

fn open_space() -> Space {
    let uffd = match Uffd::open() {
        Ok(uffd) => uffd,
        Err(error) => setup_failed("userfaultfd", error),
    };
    let fd = match descriptors::keep(uffd.fd()) {
        Ok(fd) => fd,
        Err(error) => setup_failed("a descriptor for the userfaultfd", error),
    };
    let memory_fd = open_self(c"/proc/self/mem", O_RDWR_CLOEXEC);
    let page_map_fd = open_self(c"/proc/self/pagemap", O_RDONLY_CLOEXEC);
    Space::new(uffd.moved_to(fd), memory_fd, page_map_fd)
}

/// How long a send may wait for a peer that takes nothing. A slice waits for as long
/// as the link is there: whether a node is lost is home's to say, which may itself be
/// stopped by a terminal.
fn send_patience_ms(boot: &Boot) -> u32 {
    match boot.role {
        ROLE_HOME => boot.lease_ms,
        _ => u32::MAX,
    }
}

fn open_link(boot: &Boot, spec: &LinkSpec) -> Option<Link> {
    let fd = control::descriptor(spec.fd)?;
    let kind = match spec.kind {
        LINK_STREAM => LinkKind::Stream { fd },
        LINK_SEALED => LinkKind::Sealed {
            fd,
            send_key: spec.send_key,
            receive_key: spec.receive_key,
        },
        LINK_RING => LinkKind::Ring {
            bell_fd: fd,
            memory_fd: control::descriptor(spec.ring_fd)?,
            side: spec.ring_side,
        },
        _ => return None,
    };
    let config = LinkConfig {
        kind,
        spin_ns: u64::from(boot.spin_ns),
        lease_ms: send_patience_ms(boot),
    };
    // SAFETY: the launcher made the descriptors for this link alone.
    match unsafe { Link::open(&config) } {
        Ok(link) => Some(link),
        Err(error) => setup_failed("a link", error),
    }
}

fn open_links(boot: &Boot) -> [Option<Link>; MAX_NODES] {
    core::array::from_fn(|node| {
        let wanted = node < boot.nodes as usize && node != boot.node as usize;
        if wanted {
            open_link(boot, &boot.links[node])
        } else {
            None
        }
    })
}

fn empty_layout() -> own_calls::Result<Layout<'static>> {
    own_calls::zeroes(REGIONS_MAX).map(Layout::new)
}

fn make_engine(boot: &'static Boot) -> Engine {
    let Some(shared) = control::shared() else {
        log::fail(
            EXIT_SETUP,
            format_args!("no page is shared with the launcher"),
        )
    };
    clock::calibrate();
    let engine = empty_layout().and_then(|layout| {
        let links = open_links(boot);
        let space = open_space();
        let io = Io::new(boot.node as usize, links, space, layout, &shared.stats)?;
        Engine::new(boot, io)
    });
    match engine {
        Ok(engine) => engine,
        Err(error) => setup_failed("memory for the engine", error),
    }
}

/// Home: the aggregate spans its nodes from now on. `layout` is the program's;
/// its lock is held by the caller.
pub fn stretch(boot: &'static Boot, layout: &Layout<'static>) {
    let mut guard = ENGINE.lock();
    if guard.is_some() {
        return;
    }
    let engine = guard.insert(make_engine(boot));
    // From now on pages may have to leave.
    let _ = call!(munlockall);
    // Faults of other threads wait for the lock from now on.
    STRETCHED.store(true, Ordering::Release);
    engine.announce(&Message::Vdso {
        hash: VDSO_HASH.load(Ordering::Relaxed),
    });
    for region in layout.regions() {
        engine.home_mapped(region);
    }
    engine.io.stats.stretched.store(1, Ordering::Relaxed);
    engine.io.stats.executing.store(1, Ordering::Relaxed);
    engine.begin_budget();
    engine.make_room();
    engine.left_at = clock::now();
    // The launcher only shows it.
    let _ = control::send(&ControlMessage::new(CONTROL_STRETCHED, 0));
}

/// A slice's whole life: get ready, give up every right, serve; execute when
/// the execution comes.
pub fn run_slice(boot: &'static Boot) -> ! {
    let thread = match thread::allocate() {
        Ok(thread) => thread,
        Err(error) => setup_failed("a thread", error),
    };
    thread.set_id(own_calls::thread_id());
    thread.set_process(own_calls::process_id());
    thread::started();
    if let Err(error) = thread
        .use_stack()
        .and_then(|()| signal::actions::install_for_slice())
    {
        setup_failed("signal handlers", error);
    }
    // Without /proc, as under a daemon, the program gets the time at home.
    if let Ok(vdso) = vdso::relocate(space::VDSO) {
        super::has_vdso(vdso.hash());
    }
    let engine = make_engine(boot);
    // Without it nothing would ever end this slice, which would wait without rest.
    if engine.io.links[0].is_none() {
        setup_failed("its links", "it has no link to home");
    }
    let uffd = engine.io.space.fd();
    engine.io.stats.stretched.store(1, Ordering::Relaxed);
    *ENGINE.lock() = Some(engine);
    STRETCHED.store(true, Ordering::Release);
    if let Err(error) = confine::become_user(boot.uid, boot.gid) {
        setup_failed("an unprivileged user", error);
    }
    if let Err(error) = intercept::arm() {
        setup_failed("Syscall User Dispatch", error);
    }
    if let Err(error) = beat::start(boot) {
        setup_failed("a timer", error);
    }
    if let Err(error) = confine::confine(uffd, thread.process()) {
        setup_failed("seccomp", error);
    }
    // From here on pages and the execution may come.
    if let Err(error) = control::send(&ControlMessage::new(CONTROL_READY, boot.node)) {
        setup_failed("the launcher", error);
    }
    serve::serve(thread, 0);
    jump::take_context(&mut thread.start.lock());
    signal::enter(thread)
}

/// Whether the program could need more than home's budget with `more` bytes of
/// writable memory besides what it has, or should stretch in any case.
pub fn is_past_budget(boot: &Boot, layout: &Layout<'_>, more: u64) -> bool {
    let budget_bytes = budget::wanted_pages(boot).saturating_mul(PAGE);
    let wanted_bytes = layout.writable_anonymous_bytes() + more;
    boot.nodes > 1 && (boot.stretch_now != 0 || wanted_bytes > budget_bytes)
}

//! The file behind a disk: its lock, its size, and what direct I/O demands.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::changed::ChangedParts;
use super::geometry::{Geometry, SERIAL};
use super::request::Operation;
use super::trouble::Troubles;
use super::{BlockError, BlockOptions, SECTOR};

/// Largest block that a guest's file system can be expected to take.
const BLOCK_MAX: u32 = 4096;
/// Zeroes written at once where the file system cannot make them itself.
const ZEROES: usize = 64 << 10;

/// What parts of a direct access must be multiples of.
#[derive(Clone, Copy)]
struct Alignment {
    /// Addresses and lengths of buffers.
    buffer: u32,
    /// Positions on the disk.
    position: u32,
}

/// An open, locked disk.
pub struct Disk {
    path: PathBuf,
    file: File,
    sectors: u64,
    read_only: bool,
    /// What direct I/O demands.
    alignment: Option<Alignment>,
    serial: [u8; SERIAL],
    troubles: Troubles,
    /// For a copy of it.
    changed: ChangedParts,
}

impl Disk {
    /// Opens it as `options` say.
    pub fn open(options: &BlockOptions) -> Result<Self, BlockError> {
        let path = &options.path;
        let fail = |source| BlockError::Open {
            path: path.clone(),
            source,
        };
        let mut file = match &options.file {
            Some(file) => file.try_clone(),
            None => open_file(path, open_flags(options.read_only, options.direct)),
        }
        .map_err(fail)?;
        let kind = file.metadata().map_err(fail)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(BlockError::Kind(path.clone()));
        }
        // From here on waiting is right: up to Linux 6.4 io_uring answers EAGAIN
        // for such a file on a device that cannot do without (dm-crypt).
        wait_for_data(&file).map_err(fail)?;
        match options.locked_elsewhere {
            false => lock_disk(&file, path, options.read_only)?,
            true if is_held(&file, 0, 0).map_err(fail)? => {}
            true => return Err(BlockError::NotShared(path.clone())),
        }
        let sectors = file.seek(SeekFrom::End(0)).map_err(fail)? / SECTOR;
        if sectors == 0 {
            return Err(BlockError::Empty(path.clone()));
        }
        let alignment = options.direct.then(|| direct_alignment(&file));
        Ok(Self {
            serial: serial(options)?,
            troubles: Troubles::new(path.clone()),
            path: path.clone(),
            file,
            sectors,
            read_only: options.read_only,
            alignment,
            changed: ChangedParts::default(),
        })
    }

    /// Which parts of it a copy does not have.
    pub fn changed(&self) -> &ChangedParts {
        &self.changed
    }

    /// Notes an operation that has ended, of `length` bytes at `offset`: one that failed may
    /// have changed some of them.
    pub fn ended(&self, operation: Operation, offset: u64, length: u64) {
        if !matches!(operation, Operation::Read | Operation::Flush) {
            self.changed.note(offset, length);
        }
    }

    /// Locks it, again or for the first time.
    pub fn lock(&self) -> Result<(), BlockError> {
        lock_disk(&self.file, &self.path, self.read_only)
    }

    /// Lets another process lock it.
    pub fn unlock(&self) {
        // Where it fails the lock goes with the descriptor.
        let _ = set_lock(&self.file, libc::F_UNLCK, 0, 0);
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Size.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// The same in bytes.
    pub fn bytes(&self) -> u64 {
        self.sectors * SECTOR
    }

    /// As it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Logical blocks, in bytes.
    pub fn block_size(&self) -> u32 {
        let size = self.alignment.map_or(0, |alignment| alignment.position);
        size.clamp(SECTOR as u32, BLOCK_MAX)
    }

    /// What the address and length of every buffer must be a multiple of.
    pub fn buffer_alignment(&self) -> u32 {
        self.alignment.map_or(1, |alignment| alignment.buffer)
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// What a driver is told of it.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            sectors: self.sectors(),
            block_size: self.block_size(),
            read_only: self.read_only(),
            serial: self.serial().to_vec(),
        }
    }

    /// What GET_ID tells.
    pub fn serial(&self) -> &[u8; SERIAL] {
        &self.serial
    }

    /// Tells the disk's user of a request that failed: of `length` bytes at `offset`.
    pub fn report(&self, operation: Operation, offset: u64, length: u64, error: &io::Error) {
        self.troubles.report(operation, offset, length, error);
    }

    /// Fills `buffer` if all of it is in the host's memory; else, or where the file
    /// cannot tell, it does nothing of use (preadv2(2), RWF_NOWAIT).
    pub fn read_cached(&self, buffer: &mut [u8], offset: u64) -> bool {
        if self.alignment.is_some() {
            return false;
        }
        let vector = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        let (file, offset) = (self.file.as_raw_fd(), offset as i64);
        // SAFETY: the vector names `buffer`, which is borrowed for the call.
        let read = unsafe { libc::preadv2(file, &vector, 1, offset, libc::RWF_NOWAIT) };
        usize::try_from(read) == Ok(buffer.len())
    }

    /// Makes a range read as zeroes by the cheapest way that the host has.
    /// With `unmap` the space may be given back, else it should be kept.
    pub fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        let mut modes = [libc::FALLOC_FL_ZERO_RANGE, libc::FALLOC_FL_PUNCH_HOLE];
        if unmap {
            modes.reverse();
        }
        for mode in modes {
            match self.allocate(mode, offset, length) {
                Err(error) if unsupported(&error) => {}
                other => return other,
            }
        }
        let mut zeroes = vec![0_u8; ZEROES + BLOCK_MAX as usize];
        let skip = zeroes.as_ptr().align_offset(BLOCK_MAX as usize);
        let zeroes = &mut zeroes[skip..skip + ZEROES];
        let mut done = 0;
        while done < length {
            let count = zeroes.len().min((length - done) as usize);
            self.file.write_all_at(&zeroes[..count], offset + done)?;
            done += count as u64;
        }
        Ok(())
    }

    /// Forgets a range. A host that cannot keeps it, which is allowed.
    pub fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.allocate(libc::FALLOC_FL_PUNCH_HOLE, offset, length) {
            Err(error) if unsupported(&error) => Ok(()),
            other => other,
        }
    }

    fn allocate(&self, mode: i32, offset: u64, length: u64) -> io::Result<()> {
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, length) = (offset as i64, length as i64);
        // SAFETY: no memory of ours is involved; the descriptor is open.
        match unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The lock ends with the disk, not with the last copy of its descriptor: a child
/// has one until it executes its program.
impl Drop for Disk {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// Flags of open(2) for the file of a disk.
pub fn open_flags(read_only: bool, direct: bool) -> i32 {
    let access = match read_only {
        true => libc::O_RDONLY,
        false => libc::O_RDWR,
    };
    // A pipe without a writer must not hold us up.
    access | libc::O_NONBLOCK | if direct { libc::O_DIRECT } else { 0 }
}

fn open_file(path: &Path, flags: i32) -> io::Result<File> {
    let access = flags & libc::O_ACCMODE;
    OpenOptions::new()
        .read(true)
        .write(access == libc::O_RDWR)
        .custom_flags(flags & !libc::O_ACCMODE)
        .open(path)
}

/// Whether another way should be tried.
pub fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
    )
}

/// Takes O_NONBLOCK off.
fn wait_for_data(file: &File) -> io::Result<()> {
    let descriptor = file.as_raw_fd();
    // SAFETY: no memory is involved; the descriptor is open.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no memory is involved; the descriptor is open.
    match unsafe { libc::fcntl(descriptor, libc::F_SETFL, flags & !libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// QEMU's locks (block/file-posix.c): a user of an image holds the byte 100 + n
/// for each permission n that it uses and 200 + n for each that it does not share,
/// all of them for reading, and looks whether others hold those that it minds.
const QEMU_READS: i64 = 100;
const QEMU_WRITES: [i64; 2] = [101, 103];
const QEMU_FORBIDS_WRITES: [i64; 2] = [201, 203];

/// Locks a disk, or says why not.
fn lock_disk(file: &File, path: &Path, shared: bool) -> Result<(), BlockError> {
    lock_file(file, shared).map_err(|error| match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => BlockError::InUse(path.to_owned()),
        _ => BlockError::Lock {
            path: path.to_owned(),
            source: error,
        },
    })
}

/// Locks of the open file (fcntl(2), F_OFD_SETLK), which go with the last
/// descriptor: all of it for a writer; for a reader what keeps writers out, ours
/// and QEMU's, and lets QEMU's readers in.
fn lock_file(file: &File, shared: bool) -> io::Result<()> {
    if !shared {
        return set_lock(file, libc::F_WRLCK, 0, 0);
    }
    set_lock(file, libc::F_RDLCK, 0, QEMU_READS + 1)?;
    for byte in QEMU_FORBIDS_WRITES {
        set_lock(file, libc::F_RDLCK, byte, 1)?;
    }
    for byte in QEMU_WRITES {
        if is_held(file, byte, 1)? {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
    }
    Ok(())
}

/// A lock of `length` bytes; 0: to the end.
fn bytes(kind: i32, start: i64, length: i64) -> libc::flock {
    // SAFETY: flock is plain numbers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start;
    lock.l_len = length;
    lock
}

fn set_lock(file: &File, kind: i32, start: i64, length: i64) -> io::Result<()> {
    let lock = bytes(kind, start, length);
    // SAFETY: the structure outlives the call, which reads it.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether another open file has any lock of `length` bytes; 0: to the end.
fn is_held(file: &File, start: i64, length: i64) -> io::Result<bool> {
    let mut lock = bytes(libc::F_WRLCK, start, length);
    // SAFETY: the structure outlives the call, which reads and fills it.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What statx(2) says about direct I/O, else one sector.
fn direct_alignment(file: &File) -> Alignment {
    // SAFETY: statx is plain numbers, for which zero is a value.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor; the
    // structure outlives the call, which fills it.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &mut answer,
        )
    };
    let told = result == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0;
    let (buffer, position) = if told {
        (answer.stx_dio_mem_align, answer.stx_dio_offset_align)
    } else {
        (0, 0)
    };
    // A length is a multiple of the position's, whatever a buffer's address is.
    Alignment {
        buffer: buffer.max(position).max(SECTOR as u32),
        position: position.max(SECTOR as u32),
    }
}

fn serial(options: &BlockOptions) -> Result<[u8; SERIAL], BlockError> {
    let name = if options.serial.is_empty() {
        let name = options.path.file_name().unwrap_or_default();
        short(&name.to_string_lossy())
    } else {
        options.serial.clone()
    };
    let mut serial = [0; SERIAL];
    match serial.get_mut(..name.len()) {
        Some(start) => start.copy_from_slice(name.as_bytes()),
        None => return Err(BlockError::Serial(name)),
    }
    Ok(serial)
}

/// The beginning of a name, as much of it as a serial number holds.
fn short(name: &str) -> String {
    let mut end = name.len().min(SERIAL);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_disk_waits_for_its_data() {
        let path = std::env::current_exe().unwrap();
        for direct in [false, true] {
            let options = BlockOptions {
                read_only: true,
                direct,
                serial: "test".into(),
                ..BlockOptions::new(&path)
            };
            let disk = match Disk::open(&options) {
                Ok(disk) => disk,
                Err(BlockError::Open { source, .. }) if direct => {
                    eprintln!("skipped: no direct I/O here ({source})");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            // SAFETY: no memory is involved; the descriptor is open.
            let flags = unsafe { libc::fcntl(disk.file().as_raw_fd(), libc::F_GETFL) };
            assert_eq!(flags & libc::O_NONBLOCK, 0);
            assert_eq!(flags & libc::O_DIRECT != 0, direct);
        }
    }

    /// What QEMU does to open an image; whether it may.
    fn as_qemu(file: &File, held: &[i64], minded: &[i64]) -> bool {
        let hold = |byte: &i64| set_lock(file, libc::F_RDLCK, *byte, 1).is_ok();
        held.iter().all(hold) && minded.iter().all(|byte| !is_held(file, *byte, 1).unwrap())
    }

    #[test]
    fn readers_go_together_with_qemus_and_keep_its_writers_out() {
        let path = std::env::temp_dir().join(format!("weft-lock-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let options = BlockOptions {
            read_only: true,
            ..BlockOptions::new(&path)
        };
        let open = || File::open(&path).unwrap();
        let reads = |file: &File| as_qemu(file, &[100, 201, 203], &[101, 103, 200]);
        let writes = |file: &File| as_qemu(file, &[100, 101, 201, 203], &[101, 103, 200, 201]);

        let qemu = open();
        assert!(reads(&qemu));
        let disk = Disk::open(&options).unwrap();
        drop(qemu);
        assert!(reads(&open()));
        assert!(!writes(&open()));
        drop(disk);
        let qemu = open();
        assert!(writes(&qemu));
        assert!(matches!(Disk::open(&options), Err(BlockError::InUse(_))));
        drop(qemu);
        let writable = BlockOptions::new(&path);
        let disk = Disk::open(&writable).unwrap();
        assert!(!reads(&open()));
        drop(disk);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_lock_ends_with_its_disk_whoever_has_the_descriptor() {
        let name = format!("weft-disk-{}-inherited", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, [0; 4096]).unwrap();
        let options = BlockOptions::new(&path);
        let disk = Disk::open(&options).unwrap();
        let inherited = disk.file().try_clone().unwrap();
        assert!(Disk::open(&options).is_err());
        drop(disk);
        Disk::open(&options).unwrap();
        drop(inherited);
        std::fs::remove_file(&path).unwrap();
    }
}

//! The stack with which a program starts (System V x86-64 ABI, 3.4.1; the order
//! of the strings as in `fs/binfmt_elf.c`).
//!
//! ```text
//! top        eight zero bytes
//!            path of the program (AT_EXECFN)
//!            environment strings, ascending
//!            argument strings, ascending, right below: setproctitle relies on it
//!            platform string, 16 random bytes, padding
//!            auxiliary vector, ends with AT_NULL
//!            environment pointers, NULL
//!            argument pointers, NULL
//! pointer →  argument count; a multiple of 16
//! ```

use linux_raw_sys::auxvec::{AT_EXECFN, AT_NULL, AT_PLATFORM, AT_RANDOM};

/// Longest single string, bytes, NUL included (`MAX_ARG_STRLEN`).
pub const STRING_MAX: usize = 128 << 10;
/// Most bytes of arguments and environment that Linux takes by default: a
/// quarter of an 8 MiB stack.
pub const LIMIT: usize = 2 << 20;

/// What a program is started with.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a, A, E> {
    /// Arguments, without their NULs. Cloned to be walked several times.
    pub arguments: A,
    /// Environment, as the arguments.
    pub environment: E,
    /// Auxiliary vector, without AT_NULL and the entries whose values are on the
    /// stack itself: AT_RANDOM, AT_PLATFORM, AT_EXECFN.
    pub auxiliary: &'a [(u64, u64)],
    /// Path with which the program was executed.
    pub path: &'a [u8],
    /// Name of the processor, `x86_64`.
    pub platform: &'a [u8],
    /// From the kernel's generator; the C library makes its canaries of them.
    pub random: [u8; 16],
}

/// A stack that was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stack {
    /// The stack pointer at the program's first instruction.
    pub pointer: u64,
    /// Bytes from `pointer` to the top: that many at the end of the buffer count.
    pub length: usize,
}

/// Why a stack was not built; E2BIG.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StackError {
    /// Arguments and environment are too long together.
    #[error("arguments and environment need {length} bytes of stack; {limit} are allowed")]
    TooLarge {
        /// What they need.
        length: usize,
        /// What is allowed.
        limit: usize,
    },
    /// One string is too long.
    #[error("an argument or environment string of {length} bytes; {STRING_MAX} are allowed")]
    StringTooLong {
        /// Its length, NUL included.
        length: usize,
    },
    /// The top is not aligned.
    #[error("the top of a stack, {top:#x}, is not a multiple of 16")]
    Unaligned { top: u64 },
}

impl<'a, A, E> Start<'a, A, E>
where
    A: Iterator<Item = &'a [u8]> + Clone,
    E: Iterator<Item = &'a [u8]> + Clone,
{
    /// Builds the stack in the end of `buffer`, which will be at the addresses
    /// below `top`. At most `limit` bytes are used, and at most all of `buffer`.
    pub fn build(&self, top: u64, limit: usize, buffer: &mut [u8]) -> Result<Stack, StackError> {
        if !top.is_multiple_of(16) {
            return Err(StackError::Unaligned { top });
        }
        let sizes = self.sizes()?;
        let limit = limit.min(buffer.len()).min(top as usize);
        if sizes.total > limit {
            return Err(StackError::TooLarge {
                length: sizes.total,
                limit,
            });
        }
        let from = buffer.len() - sizes.total;
        let used = &mut buffer[from..];
        used.fill(0);
        let pointer = top - sizes.total as u64;
        let mut words = Writer { at: 0, bytes: used };
        self.write_words(pointer, &sizes, &mut words);
        self.write_strings(&sizes, used);
        Ok(Stack {
            pointer,
            length: sizes.total,
        })
    }

    fn sizes(&self) -> Result<Sizes, StackError> {
        let (arguments, argument_bytes) = strings(self.arguments.clone())?;
        let (variables, variable_bytes) = strings(self.environment.clone())?;
        let words = 1 + arguments + 1 + variables + 1 + 2 * (self.auxiliary.len() + 4);
        let random = (8 * words).next_multiple_of(16);
        let platform = random + self.random.len();
        let text = platform + self.platform.len() + 1;
        let text_bytes = argument_bytes + variable_bytes + self.path.len() + 1 + END;
        // The strings end at the top, so the padding comes before them.
        let total = (text + text_bytes).next_multiple_of(16);
        Ok(Sizes {
            arguments,
            random,
            platform,
            strings: total - text_bytes,
            environment: total - text_bytes + argument_bytes,
            path: total - END - self.path.len() - 1,
            total,
        })
    }
    fn write_words(&self, pointer: u64, sizes: &Sizes, words: &mut Writer<'_>) {
        let address = |offset: usize| pointer + offset as u64;
        words.put(sizes.arguments as u64);
        let mut offset = sizes.strings;
        for argument in self.arguments.clone() {
            words.put(address(offset));
            offset += argument.len() + 1;
        }
        words.put(0);
        let mut offset = sizes.environment;
        for variable in self.environment.clone() {
            words.put(address(offset));
            offset += variable.len() + 1;
        }
        words.put(0);
        let own = [
            (AT_RANDOM, address(sizes.random)),
            (AT_PLATFORM, address(sizes.platform)),
            (AT_EXECFN, address(sizes.path)),
            (AT_NULL, 0),
        ];
        let own = own.iter().map(|&(kind, value)| (u64::from(kind), value));
        for (kind, value) in self.auxiliary.iter().copied().chain(own) {
            words.put(kind);
            words.put(value);
        }
    }
    fn write_strings(&self, sizes: &Sizes, used: &mut [u8]) {
        let mut copy = |offset: usize, string: &[u8]| {
            used[offset..offset + string.len()].copy_from_slice(string);
            offset + string.len() + 1
        };
        copy(sizes.random, &self.random);
        copy(sizes.platform, self.platform);
        let mut offset = sizes.strings;
        for argument in self.arguments.clone() {
            offset = copy(offset, argument);
        }
        for variable in self.environment.clone() {
            offset = copy(offset, variable);
        }
        copy(offset, self.path);
    }
}

/// Zero bytes at the very top.
const END: usize = 8;

/// Offsets from the stack pointer, bytes.
struct Sizes {
    arguments: usize,
    random: usize,
    platform: usize,
    strings: usize,
    environment: usize,
    path: usize,
    total: usize,
}

/// How many strings there are, and their bytes, NULs included.
fn strings<'a>(strings: impl Iterator<Item = &'a [u8]>) -> Result<(usize, usize), StackError> {
    let (mut count, mut bytes) = (0, 0usize);
    for string in strings {
        let length = string.len() + 1;
        if length > STRING_MAX {
            return Err(StackError::StringTooLong { length });
        }
        count += 1;
        bytes = bytes.saturating_add(length);
    }
    Ok((count, bytes))
}

struct Writer<'a> {
    at: usize,
    bytes: &'a mut [u8],
}

impl Writer<'_> {
    fn put(&mut self, word: u64) {
        self.bytes[self.at..self.at + 8].copy_from_slice(&word.to_le_bytes());
        self.at += 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOP: u64 = 0x7f_0000_0000;

    struct View<'a>(&'a [u8], u64);

    impl View<'_> {
        fn word(&self, address: u64) -> u64 {
            let at = (address - self.1) as usize;
            u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
        }
        fn string(&self, address: u64) -> Vec<u8> {
            let at = (address - self.1) as usize;
            self.0[at..]
                .iter()
                .copied()
                .take_while(|&b| b != 0)
                .collect()
        }
    }

    fn check(arguments: &[Vec<u8>], environment: &[Vec<u8>], auxiliary: &[(u64, u64)]) {
        let start = Start {
            arguments: arguments.iter().map(Vec::as_slice),
            environment: environment.iter().map(Vec::as_slice),
            auxiliary,
            path: b"/bin/program",
            platform: b"x86_64",
            random: *b"0123456789abcdef",
        };
        let mut buffer = vec![0xaa; 64 << 10];
        let stack = start.build(TOP, LIMIT, &mut buffer).unwrap();
        assert!(stack.pointer.is_multiple_of(16));
        assert_eq!(TOP - stack.pointer, stack.length as u64);
        let (below, used) = buffer.split_at(buffer.len() - stack.length);
        assert!(
            below.iter().all(|&byte| byte == 0xaa),
            "wrote below the stack"
        );
        let view = View(used, stack.pointer);
        let mut at = stack.pointer;
        let mut next = || {
            at += 8;
            view.word(at - 8)
        };
        assert_eq!(next(), arguments.len() as u64);
        let mut expected = None;
        for strings in [arguments, environment] {
            for string in strings {
                let address = next();
                assert_eq!(&view.string(address), string);
                // One string directly behind the other.
                assert!(expected.is_none_or(|expected| expected == address));
                expected = Some(address + string.len() as u64 + 1);
            }
            assert_eq!(next(), 0);
        }
        for &(kind, value) in auxiliary {
            assert_eq!((next(), next()), (kind, value));
        }
        assert_eq!(next(), u64::from(AT_RANDOM));
        assert_eq!(view.string(next())[..16], *b"0123456789abcdef");
        assert_eq!(next(), u64::from(AT_PLATFORM));
        assert_eq!(view.string(next()), b"x86_64");
        assert_eq!(next(), u64::from(AT_EXECFN));
        assert_eq!(view.string(next()), b"/bin/program");
        assert_eq!((next(), next()), (0, 0));
    }

    fn string() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(1..=255u8, 0..40)
    }

    proptest! {
        #[test]
        fn every_start_can_be_read_back(
            arguments in proptest::collection::vec(string(), 0..20),
            environment in proptest::collection::vec(string(), 0..20),
            auxiliary in proptest::collection::vec((3..100u64, any::<u64>()), 0..20),
        ) {
            check(&arguments, &environment, &auxiliary);
        }
    }

    #[test]
    fn too_much_is_an_error() {
        let long = vec![b'x'; STRING_MAX];
        let arguments = [long.as_slice()];
        let start = |strings: usize| Start {
            arguments: std::iter::repeat_n(&arguments[0][..1000], strings),
            environment: std::iter::empty(),
            auxiliary: &[],
            path: b"p",
            platform: b"x",
            random: [0; 16],
        };
        let mut buffer = vec![0; 4096];
        assert!(start(3).build(TOP, LIMIT, &mut buffer).is_ok());
        let short = start(3).build(TOP, 2000, &mut buffer);
        assert!(matches!(
            short,
            Err(StackError::TooLarge { limit: 2000, .. })
        ));
        let short = start(10).build(TOP, LIMIT, &mut buffer);
        assert!(matches!(
            short,
            Err(StackError::TooLarge { limit: 4096, .. })
        ));
        let uneven = start(1).build(TOP + 8, LIMIT, &mut buffer);
        assert_eq!(uneven, Err(StackError::Unaligned { top: TOP + 8 }));
        let start = Start {
            arguments: arguments.iter().copied(),
            environment: std::iter::empty(),
            auxiliary: &[],
            path: b"p",
            platform: b"x",
            random: [0; 16],
        };
        let length = STRING_MAX + 1;
        assert_eq!(
            start.build(TOP, LIMIT, &mut buffer),
            Err(StackError::StringTooLong { length })
        );
    }
}

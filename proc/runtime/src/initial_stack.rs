//! What the kernel leaves on the stack of a new process: arguments, environment,
//! auxiliary vector.

use core::ffi::CStr;

/// What the kernel left on the initial stack.
pub struct Initial {
    pub arguments: &'static [*const u8],
    /// Environment, without the runtime's own variable.
    pub environment: &'static [*const u8],
    /// Auxiliary vector: pairs of key and value, without the closing pair.
    pub auxiliary: &'static [[usize; 2]],
}

/// Reads a string of the initial stack.
///
/// # Safety
/// `text` is one of the kernel's NUL-terminated strings.
pub unsafe fn string(text: *const u8) -> &'static [u8] {
    // SAFETY: passed on to the caller; the initial stack is never unmapped.
    unsafe { CStr::from_ptr(text.cast()) }.to_bytes()
}

impl Initial {
    /// Parses the initial stack.
    ///
    /// # Safety
    /// `stack` is the stack pointer at the entry point.
    pub unsafe fn parse(stack: *mut usize) -> Initial {
        // SAFETY: the layout that the kernel guarantees to a new program:
        // count, arguments, null, environment, null, auxiliary pairs.
        unsafe {
            let count = *stack;
            let arguments = stack.add(1);
            let environment = arguments.add(count + 1);
            let mut variables = 0;
            while *environment.add(variables) != 0 {
                variables += 1;
            }
            let auxiliary = environment.add(variables + 1).cast::<[usize; 2]>();
            let mut pairs = 0;
            while (*auxiliary.add(pairs))[0] != 0 {
                pairs += 1;
            }
            Initial {
                arguments: core::slice::from_raw_parts(arguments.cast(), count),
                environment: core::slice::from_raw_parts(environment.cast(), variables),
                auxiliary: core::slice::from_raw_parts(auxiliary, pairs),
            }
        }
    }
    /// A value of the auxiliary vector.
    pub fn auxiliary_value(&self, key: usize) -> Option<usize> {
        self.auxiliary
            .iter()
            .find(|pair| pair[0] == key)
            .map(|pair| pair[1])
    }
    /// Takes a variable out of the environment.
    pub fn take(&mut self, name: &[u8]) -> Option<&'static [u8]> {
        let found = self.environment.iter().position(|&entry| {
            // SAFETY: entries are the kernel's strings.
            let entry = unsafe { string(entry) };
            entry.len() > name.len() && entry.starts_with(name) && entry[name.len()] == b'='
        })?;
        // SAFETY: entries are the kernel's strings.
        let entry = unsafe { string(self.environment[found]) };
        let base = self.environment.as_ptr().cast_mut();
        let length = self.environment.len();
        // SAFETY: the array is on the initial stack, which is writable and used
        // through `self` only; the entries behind move down by one.
        self.environment = unsafe {
            core::ptr::copy(base.add(found + 1), base.add(found), length - found - 1);
            core::slice::from_raw_parts(base, length - 1)
        };
        Some(&entry[name.len() + 1..])
    }
}

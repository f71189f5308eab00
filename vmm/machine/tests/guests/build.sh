#!/bin/sh
# Builds the test kernels into the folder given.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
flags="-m32 -march=i686 -O1 -ffreestanding -fno-pic -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -static -Wall -Wextra -Werror"
link="-Wl,-T,$here/link.ld -Wl,--build-id=none -Wl,-z,max-page-size=4096 -Wl,--no-warn-rwx-segments"
# shellcheck disable=SC2086
gcc $flags $link -o "$out/multiboot.elf" "$here/multiboot.S" "$here/guest.c"
# shellcheck disable=SC2086
gcc $flags $link -DADDRESSES -o "$out/multiboot-flat.elf" "$here/multiboot.S" "$here/guest.c"
objcopy -O binary "$out/multiboot-flat.elf" "$out/multiboot.bin"
# shellcheck disable=SC2086
gcc $flags $link -o "$out/pvh.elf" "$here/pvh.S" "$here/guest.c"

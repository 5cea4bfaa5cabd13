//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// modules that the tests need where the kernel has them as modules, and the disk to boot with.
var modules = []string{"virtio_pci", "virtio_blk", "ext4", "sch_netem", "sch_fq", "sch_tbf", "sch_htb", "sch_fq_codel", "veth", "bridge", "dummy", "tun"}

// image is what a machine boots: a kernel and a first file system.
type image struct {
	vmlinux, initramfs, disk string
}

// prepare makes the image of a kernel that runs what lies in tests: each NAME.test, with the arguments in NAME.args.
func (u unpacked) prepare(ctx context.Context, work, tests string, args ...string) (image, error) {
	img := image{
		vmlinux:   filepath.Join(u.root, "vmlinux"),
		initramfs: filepath.Join(work, "initramfs"),
		disk:      filepath.Join(work, "disk"),
	}
	if _, err := os.Stat(img.vmlinux); errors.Is(err, os.ErrNotExist) {
		if err := u.extract(ctx, img.vmlinux); err != nil {
			return img, err
		}
	}
	root := filepath.Join(work, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return img, err
	}
	if err := os.CopyFS(filepath.Join(root, "tests"), os.DirFS(tests)); err != nil {
		return img, err
	}
	if err := os.WriteFile(filepath.Join(root, "tests", "kerneltest.args"), []byte(strings.Join(args, " ")), 0o644); err != nil {
		return img, err
	}
	if err := build(ctx, "./internal/vmtest/guest", filepath.Join(root, "init")); err != nil {
		return img, err
	}
	if err := u.modules(ctx, filepath.Join(root, "modules")); err != nil {
		return img, err
	}
	return img, errors.Join(
		shell(ctx, root, "find . | cpio --quiet -o -H newc >"+img.initramfs),
		// 256 MB: room for the files that the tests evict
		shell(ctx, work, "truncate -s 256M disk && mkfs.ext4 -qF disk"))
}

// extract takes the ELF out of the bzImage: qemu enters it at once, which spares
// the emulator the kernel's own decompression.
func (u unpacked) extract(ctx context.Context, to string) error {
	var bz []byte
	for _, f := range []string{"boot/vmlinuz-" + u.release, "usr/lib/modules/" + u.release + "/vmlinuz", "lib/modules/" + u.release + "/vmlinuz"} {
		b, err := os.ReadFile(filepath.Join(u.root, f))
		if err == nil {
			bz = b
			break
		}
	}
	// Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length
	if len(bz) < 0x250 || string(bz[0x202:0x206]) != "HdrS" {
		return fmt.Errorf("%s: no bzImage", u.root)
	}
	begin := (int(bz[0x1f1])+1)*512 + int(binary.LittleEndian.Uint32(bz[0x248:]))
	end := begin + int(binary.LittleEndian.Uint32(bz[0x24c:]))
	if end > len(bz) || begin >= end-4 {
		return fmt.Errorf("%s: payload of the bzImage lies at %d–%d of %d bytes", u.root, begin, end, len(bz))
	}
	payload := bz[begin : end-4] // its last four bytes are the size of what is inside
	for magic, tool := range map[string]string{"\xfd7zXZ": "xz", "\x28\xb5\x2f\xfd": "zstd", "\x02\x21\x4c\x18": "lz4", "\x1f\x8b": "gzip"} {
		if !strings.HasPrefix(string(payload), magic) {
			continue
		}
		cmd := exec.CommandContext(ctx, tool, "-dc")
		cmd.Stdin = bytes.NewReader(payload)
		elf, err := cmd.Output()
		if err != nil || !bytes.HasPrefix(elf, []byte("\x7fELF")) {
			return fmt.Errorf("%s: %s does not unpack the kernel: %w", u.root, tool, err)
		}
		return os.WriteFile(to, elf, 0o644)
	}
	return fmt.Errorf("%s: kernel packed in a way that is not known: % x", u.root, payload[:6])
}

// modules copies those wanted with what they depend on, numbered in the order to load them in.
func (u unpacked) modules(ctx context.Context, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	base := u.root
	if _, err := os.Stat(filepath.Join(base, "lib/modules", u.release)); err != nil {
		base = filepath.Join(u.root, "usr")
	}
	if b, err := exec.CommandContext(ctx, "depmod", "-b", base, u.release).CombinedOutput(); err != nil {
		return fmt.Errorf("depmod: %w: %s", err, b)
	}
	seen := map[string]bool{}
	for _, m := range modules {
		// a kernel that has it built in says so, one that has not got it fails: the tests that need it say what they miss
		out, err := exec.CommandContext(ctx, "modprobe", "-d", base, "-S", u.release, "-C", "/dev/null", "--show-depends", m).Output()
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line)
			if len(f) < 2 || f[0] != "insmod" || seen[f[1]] {
				continue
			}
			seen[f[1]] = true
			name, _, _ := strings.Cut(filepath.Base(f[1]), ".ko")
			target := filepath.Join(to, fmt.Sprintf("%03d-%s.ko", len(seen), name))
			unpack := "cat"
			switch filepath.Ext(f[1]) {
			case ".xz":
				unpack = "xz -dc"
			case ".zst":
				unpack = "zstd -qdc"
			}
			if err := shell(ctx, to, unpack+" "+f[1]+" >"+target); err != nil {
				return err
			}
		}
	}
	return nil
}

func shell(ctx context.Context, dir, command string) error {
	cmd := exec.CommandContext(ctx, "sh", "-ec", command)
	cmd.Dir = dir
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, b)
	}
	return nil
}

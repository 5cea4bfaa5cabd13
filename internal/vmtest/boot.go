//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// boot runs a machine until it switches itself off, gives its results line by
// line, and returns the exit status that the guest named. The options are for the
// kernel's command line.
//
// Software emulation only: the machines this runs on are virtual themselves, and
// nested KVM is not to be had, or hangs.
func boot(ctx context.Context, img image, options, work string, result func(line string)) (int, error) {
	lines := filepath.Join(work, "results")
	console := filepath.Join(work, "console")
	if err := mkfifo(lines); err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		// one CPU: the emulator is not to be trusted when one patches the code that the other runs, which is what
		// attaching does
		"-accel", "tcg", "-cpu", "max", "-machine", "q35", "-smp", "1", "-m", "1536",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:"+console, "-chardev", "pipe,id=results,path="+lines, "-serial", "chardev:results",
		// 16 MiB/s: a disk is slower than the memory that it is read to, be that emulated
		"-drive", "file="+img.disk+",if=none,id=d0,format=raw,cache=unsafe,throttling.bps-total=16777216", "-device", "virtio-blk-pci,drive=d0",
		"-kernel", img.vmlinux, "-initrd", img.initramfs,
		"-append", "console=ttyS0 loglevel=4 panic=-1 oops=panic no_timer_check random.trust_cpu=on rdinit=/init "+options)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("qemu: %w", err)
	}
	// both ends open, so that neither the open nor a read ends before the machine does
	pipe, err := os.OpenFile(lines+".out", os.O_RDWR, 0)
	if err != nil {
		_ = cmd.Process.Kill()
		return 0, errors.Join(err, cmd.Wait())
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		_, _ = io.WriteString(pipe, "\n"+endOfMachine+"\n")
	}()
	status := -1
	for s := bufio.NewScanner(pipe); s.Scan(); {
		line := strings.TrimRight(s.Text(), "\r")
		if line == endOfMachine {
			break
		}
		if _, err := fmt.Sscanf(line, "guest: exit %d", &status); err == nil {
			continue
		}
		result(line)
	}
	err = <-ended
	_ = pipe.Close()
	if status >= 0 {
		return status, nil
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("out of time: %w", ctx.Err())
	}
	tail, e := os.ReadFile(console)
	if len(tail) > 4000 {
		tail = tail[len(tail)-4000:]
	}
	return 0, fmt.Errorf("%w\n%s\n%s", errors.Join(errors.New("the machine ended without a verdict"), err, e), stderr.String(), tail)
}

// endOfMachine cannot come from the guest: its lines pass through a terminal, which has no such byte in it.
const endOfMachine = "\x00machine ended"

// mkfifo makes the pair that qemu's pipe device wants.
func mkfifo(path string) error {
	for _, p := range []string{path + ".in", path + ".out"} {
		if err := syscall.Mkfifo(p, 0o600); err != nil {
			return fmt.Errorf("mkfifo %s: %w", p, err)
		}
	}
	return nil
}

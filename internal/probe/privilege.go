//go:build linux

package probe

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// checkCapabilities returns an error that names what the process lacks.
func checkCapabilities() error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return fmt.Errorf("read our own capabilities: %w", err)
	}
	return missingCapabilities(status)
}

func missingCapabilities(status []byte) error {
	_, rest, ok := bytes.Cut(status, []byte("CapEff:"))
	if !ok {
		return errors.New("read our own capabilities: no CapEff in /proc/self/status")
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	effective, err := strconv.ParseUint(string(bytes.TrimSpace(line)), 16, 64)
	if err != nil {
		return fmt.Errorf("read our own capabilities: %w", err)
	}
	has := func(c int) bool { return effective&(1<<c) != 0 }
	if has(unix.CAP_SYS_ADMIN) {
		return nil
	}
	var lacking []string
	for _, c := range []struct {
		number int
		name   string
	}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_PERFMON, "CAP_PERFMON"}} {
		if !has(c.number) {
			lacking = append(lacking, c.name)
		}
	}
	if lacking == nil {
		return nil
	}
	return fmt.Errorf("missing %s: run the collector as root, give it the capabilities (setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_dac_read_search+ep on the binary, AmbientCapabilities= in a systemd unit, capabilities.add in a container)", strings.Join(lacking, " and "))
}

// checkKernel returns an error if the running kernel is older than what the programs
// can be loaded on.
func checkKernel() error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("read the kernel's release: %w", err)
	}
	return tooOld(unix.ByteSliceToString(name.Release[:]))
}

// tooOld knows Linux 5.14 as the first that keeps state with tasks for programs at
// tracepoints and names a task's state as it is read here. A release that is not
// understood is left to the trial.
func tooOld(release string) error {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major > 5 || major == 5 && minor >= 14 {
		return nil
	}
	return fmt.Errorf("kernel %s is too old: requests can be watched from Linux 5.14 on (RHEL 9, Debian 12, Ubuntu 24.04 and later)", release)
}

// lockedDown returns how far the kernel is locked down: "none", "integrity" or
// "confidentiality"; "" if it does not say (no securityfs, no such module).
func lockedDown(root string) string {
	b, _ := os.ReadFile(filepath.Join(root, "sys/kernel/security/lockdown"))
	_, rest, _ := strings.Cut(string(b), "[")
	mode, _, _ := strings.Cut(rest, "]")
	return mode
}

// explain puts the kernel's refusals into words.
func explain(err error) error {
	if lockedDown("/") == "confidentiality" {
		return fmt.Errorf("the kernel is locked down for confidentiality, and so lets no program read its memory: boot it with lockdown=integrity, or without: %w", err)
	}
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) && len(verifier.Log) > 0 {
		return fmt.Errorf("the kernel's verifier refused a program; please report this with the kernel's version: %+v", verifier) //nolint:errorlint // %+v prints the whole log, %w its last lines
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the kernel refused although the capabilities are there (lockdown, seccomp, or kernel.unprivileged_bpf_disabled with an LSM policy?): %w", err)
	}
	return err
}

// onlineCPUs parses /sys/devices/system/cpu/online, such as "0-3,6".
func onlineCPUs() ([]int, error) {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, fmt.Errorf("list the online CPUs: %w", err)
	}
	return parseCPUs(strings.TrimSpace(string(b)))
}

func parseCPUs(list string) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.Atoi(first)
		if err != nil {
			return nil, fmt.Errorf("CPU list %q: %w", list, err)
		}
		b, err := strconv.Atoi(last)
		if err != nil || b < a || b > 1<<16 {
			return nil, fmt.Errorf("CPU list %q: bad range %q", list, part)
		}
		for cpu := a; cpu <= b; cpu++ {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

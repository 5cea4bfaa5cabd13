//go:build linux

package kerneltest

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// hide puts an empty directory or file in the place of each path, in this process's mount namespace.
func hide(t *testing.T, paths ...string) {
	t.Helper()
	require.NoError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	for _, p := range paths {
		info, err := os.Stat(p)
		if os.IsNotExist(err) {
			continue // hidden already
		}
		require.NoError(t, err)
		if info.IsDir() {
			require.NoError(t, unix.Mount("empty", p, "tmpfs", 0, ""))
		} else {
			require.NoError(t, unix.Mount("/dev/null", p, "", unix.MS_BIND, ""))
		}
	}
}

// deny makes a system call fail with EPERM from here on, as container runtimes do it.
func deny(t *testing.T, number uint32) {
	t.Helper()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // of struct seccomp_data: the number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: number},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	require.Zero(t, errno)
}

// What a confined receiver can still do, and what it says. Each case runs in a process with a mount namespace of its own.
func TestAConfinedReceiverSaysWhatIsMissing(t *testing.T) {
	requireRoot(t)
	const caseEnv = "EBPFLLM_KERNELTEST_CONFINED"
	for _, tt := range []struct {
		name        string
		confine     func(t *testing.T)
		refused     []string // parts of the error; nil if it starts
		unavailable map[stage.Stage]string
	}{
		{
			name: "no type information",
			confine: func(t *testing.T) {
				t.Helper()
				hide(t, "/sys/kernel/btf/vmlinux", "/boot", "/lib/modules", "/usr/lib/debug")
			},
			refused: []string{"no type information (/sys/kernel/btf/vmlinux)", "CONFIG_DEBUG_INFO_BTF"},
		},
		{
			name:    "no tracefs",
			confine: func(t *testing.T) { t.Helper(); hide(t, "/sys/kernel/tracing", "/sys/kernel/debug") },
		},
		{
			name:        "no perf events",
			confine:     func(t *testing.T) { t.Helper(); deny(t, unix.SYS_PERF_EVENT_OPEN) },
			unavailable: map[stage.Stage]string{stage.PageFault: "open the software event of perf_event/page_fault_minor"},
		},
		{
			name:    "no bpf(2)",
			confine: func(t *testing.T) { t.Helper(); deny(t, unix.SYS_BPF) },
			refused: []string{"seccomp"},
		},
	} {
		switch os.Getenv(caseEnv) {
		case "":
			t.Run(tt.name, func(t *testing.T) {
				cmd := exec.Command(os.Args[0], "-test.run", "^TestAConfinedReceiverSaysWhatIsMissing$", "-test.v")
				cmd.Env = append(os.Environ(), caseEnv+"="+tt.name)
				cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s", out)
				assert.Contains(t, string(out), "--- PASS")
			})
		case tt.name:
			tt.confine(t)
			p, err := probe.New(probe.Config{RingBytes: 4096}, zap.NewNop())
			if tt.refused != nil {
				require.Error(t, err)
				for _, s := range tt.refused {
					require.ErrorContains(t, err, s)
				}
				return
			}
			require.NoError(t, err)
			defer p.Close()
			for _, r := range p.Report() {
				reason, missing := tt.unavailable[r.Stage]
				assert.Equal(t, !missing, r.Available, "%+v", r)
				assert.True(t, strings.HasPrefix(r.Reason, reason), "%+v", r)
			}
		}
	}
}

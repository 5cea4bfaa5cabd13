package target

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeProc is a proc file system in a directory. Its processes live in one
// network namespace, number 77.
type fakeProc struct {
	t    *testing.T
	root string
	tcp  map[uint16]int // port -> inode of its listening socket
}

type fakeProcess struct {
	parent  uint32
	start   uint64
	exe     string
	args    []string
	environ []string
	cgroup  string
	ports   []uint16
}

func newFakeProc(t *testing.T) *fakeProc {
	t.Helper()
	return &fakeProc{t: t, root: t.TempDir(), tcp: map[uint16]int{}}
}

func (f *fakeProc) proc() Proc { return NewProc(f.root) }

// put makes the process pid, or replaces it.
func (f *fakeProc) put(pid uint32, p fakeProcess) {
	f.remove(pid)
	dir := filepath.Join(f.root, strconv.Itoa(int(pid)))
	for _, d := range []string{"fd", "ns", "net"} {
		require.NoError(f.t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	f.write(dir, "stat", fmt.Sprintf("%d (a) S 1 (x) S %d 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 20 0 %d 0\n", pid, p.parent, p.start))
	f.write(dir, "cmdline", strings.Join(append(p.args, ""), "\x00"))
	f.write(dir, "environ", strings.Join(append(p.environ, ""), "\x00"))
	f.write(dir, "cgroup", p.cgroup)
	if p.exe != "" {
		require.NoError(f.t, os.Symlink(p.exe, filepath.Join(dir, "exe")))
	}
	require.NoError(f.t, os.Symlink("net:[77]", filepath.Join(dir, "ns/net")))
	require.NoError(f.t, os.Symlink("/dev/null", filepath.Join(dir, "fd/0")))
	for i, port := range p.ports {
		if f.tcp[port] == 0 {
			f.tcp[port] = 1000 + len(f.tcp)
		}
		require.NoError(f.t, os.Symlink(fmt.Sprintf("socket:[%d]", f.tcp[port]), filepath.Join(dir, "fd", strconv.Itoa(3+i))))
	}
	f.table()
}

// table writes the namespace's sockets into every process's view of them.
func (f *fakeProc) table() {
	tcp := "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	others := ""
	for port, inode := range f.tcp {
		tcp += fmt.Sprintf("   0: 00000000:%04X 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 %d 1 0 100 0 0 10 0\n", port, inode)
		others += fmt.Sprintf("   1: 0100007F:%04X 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 %d 1 0 100 0 0 10 0\n", port+1, inode+500)
	}
	dirs, err := filepath.Glob(filepath.Join(f.root, "*"))
	require.NoError(f.t, err)
	for _, d := range dirs {
		f.write(d, "net/tcp", tcp+others)
	}
}

func (f *fakeProc) write(dir, name, content string) {
	require.NoError(f.t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644))
}

func (f *fakeProc) remove(pid uint32) {
	require.NoError(f.t, os.RemoveAll(filepath.Join(f.root, strconv.Itoa(int(pid)))))
}

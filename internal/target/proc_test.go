package target

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const id64 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestProcReadsAProcess(t *testing.T) {
	f := newFakeProc(t)
	f.put(42, fakeProcess{
		parent: 7, start: 99, exe: "/opt/llama/llama-server (deleted)",
		args:    []string{"llama-server", "-m", "model.gguf"},
		environ: []string{"SECRET=x", "OTEL_SERVICE_NAME=chat"},
		cgroup:  "0::/system.slice/docker-" + id64 + ".scope\n",
		ports:   []uint16{8080, 8081},
	})
	p, err := f.proc().Process(42)
	require.NoError(t, err)
	f.proc().Identify(&p)
	assert.Equal(t, Process{
		PID: 42, ParentPID: 7, StartTime: 99,
		Path: "/opt/llama/llama-server", Executable: "llama-server",
		CommandLine: "llama-server -m model.gguf",
		Identity: Identity{
			ServiceName: "chat",
			Cgroup:      "0::/system.slice/docker-" + id64 + ".scope",
			ContainerID: id64,
		},
	}, p)

	listeners, err := f.proc().Listeners(42)
	require.NoError(t, err)
	assert.ElementsMatch(t, []Listener{{77, 8080}, {77, 8081}}, listeners)

	_, err = f.proc().Process(43)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestProcBoundsWhatAProcessSaysOfItself(t *testing.T) {
	f := newFakeProc(t)
	f.put(42, fakeProcess{
		exe: "/bin/x", args: []string{strings.Repeat("\xff", 1<<20)},
		environ: []string{"OTEL_SERVICE_NAME=" + strings.Repeat("é", 5000)},
	})
	p, err := f.proc().Process(42)
	require.NoError(t, err)
	f.proc().Identify(&p)
	assert.LessOrEqual(t, len(p.CommandLine), 3*maxCommandLine)
	assert.Equal(t, strings.Repeat("é", 128), p.ServiceName)
}

// A file's name may be any bytes, and names the service where nothing else does.
func TestTheNameOfAnExecutableIsUTF8(t *testing.T) {
	f := newFakeProc(t)
	f.put(42, fakeProcess{exe: "/opt/caf\xe9"})
	p, err := f.proc().Process(42)
	require.NoError(t, err)
	f.proc().Identify(&p)
	assert.Equal(t, "caf\uFFFD", p.Executable)
	assert.Equal(t, "caf\uFFFD", p.ServiceName)
	assert.Equal(t, "/opt/caf\xe9", p.Path, "a rule finds it as it is")
}

func TestServiceName(t *testing.T) {
	for environ, want := range map[string]string{
		"":                                 "",
		"OTEL_SERVICE_NAME=\x00":           "",
		"A=b\x00OTEL_SERVICE_NAME=svc\x00": "svc",
		"XOTEL_SERVICE_NAME=svc\x00":       "",
		"OTEL_RESOURCE_ATTRIBUTES=a=b, service.name = my%20svc ,c=d\x00":                "my svc",
		"OTEL_RESOURCE_ATTRIBUTES=service.name=bad%zz\x00":                              "bad%zz",
		"OTEL_RESOURCE_ATTRIBUTES=service.name=a\x00OTEL_SERVICE_NAME=b\x00":            "b",
		"OTEL_SERVICE_NAME=\x00OTEL_RESOURCE_ATTRIBUTES=service.namespace=n,,=\x00\x00": "",
	} {
		assert.Equal(t, want, serviceName([]byte(environ)), "%q", environ)
	}
}

func TestCgroup(t *testing.T) {
	tests := []struct{ name, file, line, container string }{
		{"unified", "0::/user.slice\n", "0::/user.slice", ""},
		{"kubernetes", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id64 + ".scope\n", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id64 + ".scope", id64},
		{"version 1", "9:name=systemd:/\n4:memory:/docker/" + id64 + "\n0::/\n", "4:memory:/docker/" + id64, id64},
		{"nothing but roots", "9:name=systemd:/\n0::/\n", "9:name=systemd:/", ""},
		{"in a container of a container", "0::/docker/" + strings.Repeat("a", 64) + "/docker/" + id64 + "\n", "0::/docker/" + strings.Repeat("a", 64) + "/docker/" + id64, id64},
		{"65 digits are no id", "0::/x/" + id64 + "0\n", "0::/x/" + id64 + "0", ""},
		{"empty", "", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			line, container := cgroup([]byte(tt.file))
			assert.Equal(t, tt.line, line)
			assert.Equal(t, tt.container, container)
		})
	}
}

func TestMountedContainer(t *testing.T) {
	assert.Equal(t, id64, mountedContainer([]byte(
		"1 2 8:1 / / rw - ext4 /dev/sda1 rw\n"+
			"3 1 8:1 /var/lib/docker/containers/"+id64+"/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n")))
	assert.Empty(t, mountedContainer([]byte("1 2 8:1 /"+id64+" /data rw - ext4 /dev/sda1 rw\nshort\n")))
	// the files of a pod name its sandbox
	assert.Empty(t, mountedContainer([]byte(
		"3 1 0:30 /containers/storage/overlay-containers/"+id64+"/userdata/hostname /etc/hostname rw - tmpfs tmpfs rw\n"+
			"4 1 8:1 /var/lib/kubelet/pods/0f5a1c2e/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n")))
	assert.Empty(t, mountedContainer([]byte(
		"3 1 8:1 /var/lib/containerd/io.containerd.grpc.v1.cri/sandboxes/"+id64+"/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n")))
}

// A busy host has tens of thousands of them.
func TestListeningSocketsAreReadWithoutTheOthers(t *testing.T) {
	line := func(port, state, inode string) string {
		return "   0: 0100007F:" + port + " 00000000:0000 " + state + " 00000000:00000000 00:00000000 00000000     0        0 " + inode + " 1\n"
	}
	sockets := map[uint64]uint16{}
	require.NoError(t, parseListening(io.MultiReader(
		strings.NewReader("  sl  local_address\n"+line("1F90", "0A", "12")+line("0016", "0A", "13")+line("1F90", "06", "0")),
		iotest.ErrReader(errors.New("read too far")),
	), sockets))
	assert.Equal(t, map[uint64]uint16{12: 8080, 13: 22}, sockets)
}

func TestParseStatSurvivesAnyName(t *testing.T) {
	rest := " S 12" + strings.Repeat(" 0", 17) + " 345 0"
	for _, name := range []string{"sh", "a) S 1 (b", "", ") ) )", "\n"} {
		parent, start, err := parseStat([]byte("9 (" + name + ")" + rest))
		require.NoError(t, err, name)
		assert.Equal(t, uint32(12), parent)
		assert.Equal(t, uint64(345), start)
	}
	for _, bad := range []string{"", "9 (sh", "9 (sh) S", "9 (sh) S x" + strings.Repeat(" 0", 30)} {
		_, _, err := parseStat([]byte(bad))
		assert.Error(t, err, bad)
	}
}

func FuzzProcFiles(f *testing.F) {
	f.Add([]byte("9 (a) S 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 7"))
	f.Add([]byte("OTEL_RESOURCE_ATTRIBUTES=service.name=a%20b\x00OTEL_SERVICE_NAME=x"))
	f.Add([]byte("0::/docker/" + id64 + "\n1 2 3 /" + id64 + " /etc/hosts x\n"))
	f.Add([]byte("sl\n 0: 00000000:1F90 00000000:0000 0A 0 0 0 0 0 12\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _, _ = parseStat(b)
		if name := serviceName(b); len(name) > maxServiceName {
			t.Errorf("service name of %d bytes", len(name))
		}
		if _, id := cgroup(b); id != "" && len(id) != 64 {
			t.Errorf("container %q", id)
		}
		mountedContainer(b)
		_ = parseListening(strings.NewReader(string(b)), map[uint64]uint16{})
	})
}

func TestProcReadsThisProcess(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Skipf("cannot listen on loopback: %v", err)
	}
	defer l.Close()
	if _, err := os.Stat("/proc/self/exe"); err != nil {
		t.Skip("needs a proc file system")
	}
	proc := NewProc("/proc")
	pid := uint32(os.Getpid())
	p, err := proc.Process(pid)
	require.NoError(t, err)
	proc.Identify(&p)
	exe, err := os.Executable()
	require.NoError(t, err)
	assert.Equal(t, exe, p.Path)
	assert.Equal(t, uint32(os.Getppid()), p.ParentPID)
	assert.NotZero(t, p.StartTime)
	assert.True(t, p.Go.IsGo)

	listeners, err := proc.Listeners(pid)
	require.NoError(t, err)
	var ports []uint16
	for _, l := range listeners {
		ports = append(ports, l.Port)
		assert.NotZero(t, l.NetNS)
	}
	assert.Contains(t, ports, uint16(l.Addr().(*net.TCPAddr).Port))
}

func TestReadingEveryProcessTakesTwoCapabilities(t *testing.T) {
	f := newFakeProc(t)
	assert.False(t, f.proc().ReadsAll(), "nothing is known")
	require.NoError(t, os.Mkdir(f.root+"/self", 0o755))
	for effective, want := range map[string]bool{
		"000001ffffffffff": true,
		"0000000000080004": true,
		"0000000000080002": true, // CAP_DAC_OVERRIDE does too
		"0000000000080000": false,
		"0000000000000004": false,
		"0000000000000000": false,
		"zz":               false,
	} {
		f.write(f.root+"/self", "status", "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t"+effective+"\nCapBnd:\t0\n")
		assert.Equal(t, want, f.proc().ReadsAll(), effective)
	}
}

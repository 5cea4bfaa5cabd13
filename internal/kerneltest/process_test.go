//go:build linux && amd64

package kerneltest

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/target"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
)

// Where servers live: in namespaces, containers, chroots, and as other users.

const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	parentID    = "b7ad6b7169203331"
	traceparent = "00-" + traceID + "-" + parentID + "-01"
)

// requireLinked checks that a request is tied to the trace that its traceparent named, and was measured.
func requireLinked(t *testing.T, r *request) {
	t.Helper()
	require.Equal(t, traceID, r.TraceID)
	require.Equal(t, parentID, r.ParentID)
	require.Equal(t, false, r.Attributes["ebpfllm.incomplete"], "%v", r.Attributes)
	require.NotContains(t, r.Attributes, "ebpfllm.stages.unavailable")
}

func TestAServerInAPIDNamespaceOfAPIDNamespaceIsLinkedByItsPIDHere(t *testing.T) {
	requireRoot(t)
	s := startCIn(t, "unshare", "--pid", "--fork", "--kill-child", "unshare", "--pid", "--fork", "--kill-child")
	pid, inEach := innermost(t, s.pid())
	require.Len(t, inEach, 3, "it is in a namespace of a namespace")
	require.Equal(t, "1", inEach[2])
	c := collect(t, targetC(t))
	s.ask("/lock?60", traceparent)
	r := &c.to("/lock", 1)[0]
	requireLinked(t, r)
	assert.Equal(t, int64(pid), r.pid())
	assert.Greater(t, r.Attributes["ebpfllm.tid"], int64(pid), "the thread's number here as well: in its own namespace it is 2 or 3")
	assert.Greater(t, r.stage(t, "lock"), tolerance*0.06)
}

const (
	containerA = "5f1c0b8f3c6f4c1d9c3a2b1e0d9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f"
	podUID     = "0f5a1c2e_58a5_4b0c_9d2f_3c1b7a9e6d40"
)

// group makes a cgroup of a hierarchy mounted at root, and its parents, and
// removes what it made after the server in it has ended.
func group(t *testing.T, root, path string) string {
	t.Helper()
	dir := root
	for name := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		dir = filepath.Join(dir, name)
		made := dir
		if err := os.Mkdir(dir, 0o755); err != nil {
			require.ErrorIs(t, err, os.ErrExist)
			continue
		}
		t.Cleanup(func() {
			assert.Eventually(t, func() bool { return os.Remove(made) == nil }, 5*time.Second, 20*time.Millisecond, "%s stays", made)
		})
	}
	return dir
}

// cgroupRoots finds where each version's hierarchies are mounted; of version 1
// that of memory, where container engines put processes as well.
func cgroupRoots(t *testing.T) (v1, v2 string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		switch {
		case f[2] == "cgroup2" && v2 == "":
			v2 = f[1]
		case f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",memory,"):
			v1 = f[1]
		}
	}
	return v1, v2
}

// What engines name the group of a container, on each version of cgroups.
func TestAContainerIsNamedByItsCgroup(t *testing.T) {
	requireRoot(t)
	v1, v2 := cgroupRoots(t)
	slice := "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + podUID + ".slice/"
	tests := []struct{ name, root, path, container string }{
		{"docker, version 1", v1, "/docker/" + containerA, containerA},
		{"docker", v2, "/system.slice/docker-" + containerA + ".scope", containerA},
		{"containerd in Kubernetes, version 1", v1, "/kubepods/burstable/pod0f5a1c2e/" + containerA, containerA},
		{"containerd in Kubernetes", v2, slice + "cri-containerd-" + containerA + ".scope", containerA},
		{"containerd without systemd's driver", v2, "/system.slice/containerd.service/kubepods-besteffort-pod0f5a1c2e.slice:cri-containerd:" + containerA, containerA},
		{"cri-o", v2, slice + "crio-" + containerA + ".scope", containerA},
		{"podman", v2, "/machine.slice/libpod-" + containerA + ".scope/container", containerA},
		{"no container, version 1", v1, "/ebpfllm-kerneltest", ""},
		{"no container", v2, "/system.slice/ebpfllm-kerneltest.service", ""},
	}
	servers := make([]*server, len(tests))
	for i, tt := range tests {
		if tt.root == "" {
			continue // said below
		}
		dir := group(t, tt.root, tt.path)
		servers[i] = startCIn(t)
		pid := strconv.Itoa(int(servers[i].pid()))
		// this test's own groups are not the case's
		for _, root := range []string{v1, v2} {
			if root != "" && root != tt.root {
				require.NoError(t, os.WriteFile(root+"/cgroup.procs", []byte(pid), 0o644))
			}
		}
		require.NoError(t, os.WriteFile(dir+"/cgroup.procs", []byte(pid), 0o644))
	}
	c := collect(t, targetC(t))
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if servers[i] == nil {
				t.Skip("no hierarchy of this version is mounted")
			}
			servers[i].ask("/"+strconv.Itoa(i), traceparent)
			r := &c.to("/"+strconv.Itoa(i), 1)[0]
			requireLinked(t, r)
			assert.Equal(t, int64(servers[i].pid()), r.pid())
			line, _ := r.Resource["process.linux.cgroup"].(string)
			assert.True(t, strings.HasSuffix(line, ":"+tt.path), "%q", line)
			if tt.container == "" {
				assert.NotContains(t, r.Resource, "container.id", "absent, and not empty")
			} else {
				assert.Equal(t, tt.container, r.Resource["container.id"])
			}
			for name, value := range r.Resource {
				assert.NotEmpty(t, value, name)
			}
		})
	}
}

// A container whose cgroup says nothing has its engine's files mounted; a pod's
// are of the pod.
func TestAContainerIsNamedByTheFilesThatItsEngineMounts(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		file, over, container string
	}{
		"docker": {"containers/" + containerA + "/hostname", "/etc/hostname", containerA},
		"podman": {"overlay-containers/" + containerA + "/userdata/hosts", "/etc/hosts", containerA},
		// the sandbox holds a pod's files, whichever of the pod's containers it is
		"containerd in Kubernetes": {"sandboxes/" + containerA + "/hostname", "/etc/hostname", ""},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, tt.file)
			require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
			require.NoError(t, os.WriteFile(file, nil, 0o644))
			s := startCIn(t, "unshare", "--mount", "sh", "-c", `mount --bind "$0" "$1" && shift && exec "$@"`, file, tt.over)
			mounts, err := os.ReadFile("/proc/" + strconv.Itoa(int(s.pid())) + "/mountinfo")
			require.NoError(t, err)
			require.Contains(t, string(mounts), tt.file+" "+tt.over+" ", "the precondition")
			// which group this test runs in is not the case's
			proc := target.NewProc("/proc")
			p, err := proc.Process(s.pid())
			require.NoError(t, err)
			proc.Identify(&p)
			require.NotContains(t, p.Cgroup, containerA)
			assert.Equal(t, tt.container, p.ContainerID)
		})
	}
}

func TestServersOfOtherUsersAreMeasured(t *testing.T) {
	requireRoot(t)
	binary, err := compile()
	require.NoError(t, err)
	// a place that anybody can enter
	dir, err := os.MkdirTemp("/tmp", "kerneltest") //nolint:usetesting // other users cannot enter t.TempDir
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	copied := copyFile(t, binary, dir)
	c := collect(t, targetC(t))
	for i, user := range []uint32{65534, 12345} {
		s := start(t, func(port string) *exec.Cmd {
			cmd := exec.Command(copied, port, "/dev/null")
			cmd.Dir = dir
			cmd.Env = []string{"OTEL_SERVICE_NAME=of-another-user"}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
			return cmd
		})
		var st syscall.Stat_t
		require.NoError(t, syscall.Stat("/proc/"+strconv.Itoa(int(s.pid())), &st))
		require.Equal(t, user, st.Uid)
		c.awaitTargets(int64(i + 1))
		s.ask("/lock?60", traceparent)
		r := &c.to("/lock", i+1)[i]
		requireLinked(t, r)
		assert.Equal(t, int64(s.pid()), r.pid())
		assert.Equal(t, "of-another-user", r.Resource["service.name"])
		assert.Greater(t, r.stage(t, "lock"), tolerance*0.06)
	}
}

// copyFile copies a program to a directory.
func copyFile(t *testing.T, file, dir string) string {
	t.Helper()
	in, err := os.Open(file)
	require.NoError(t, err)
	defer in.Close()
	name := filepath.Join(dir, filepath.Base(file))
	require.NoError(t, os.MkdirAll(dir, 0o755))
	out, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	require.NoError(t, err)
	_, err = io.Copy(out, in)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	return name
}

// jail makes a root directory that holds a program, as /server, and what it is linked with.
func jail(t *testing.T, program string) string {
	t.Helper()
	root := t.TempDir()
	require.NoError(t, os.Mkdir(root+"/proc", 0o755))
	require.NoError(t, os.Rename(copyFile(t, program, root), root+"/server"))
	libraries, err := exec.Command("ldd", program).CombinedOutput()
	if err != nil {
		require.Contains(t, string(libraries), "not a dynamic executable")
		return root
	}
	for word := range strings.FieldsSeq(string(libraries)) {
		if strings.HasPrefix(word, "/") {
			copyFile(t, word, root+filepath.Dir(word))
		}
	}
	return root
}

// The executable is at a path that is not the server's own; that it is a Go
// program is seen in the file itself.
func TestServersInAChrootAreFoundAndMeasured(t *testing.T) {
	requireRoot(t)
	binary, err := compile()
	require.NoError(t, err)
	for name, program := range map[string]string{"C": binary, "Go": os.Args[0]} {
		t.Run(name, func(t *testing.T) {
			program, err := filepath.Abs(program)
			require.NoError(t, err)
			root := jail(t, program)
			s := start(t, func(port string) *exec.Cmd {
				// with a mount of its own, of proc, which goes with it
				cmd := exec.Command("unshare", "--mount", "sh", "-c", `mount -t proc proc "$0/proc" && exec chroot "$0" /server "$1" /nothing`, root, port)
				cmd.Env = append(os.Environ(), serveEnv+"=127.0.0.1:"+port, "LOCK=/lock")
				return cmd
			})
			require.NoFileExists(t, "/server", "the path means something else outside")
			proc := target.NewProc("/proc")
			p, err := proc.Process(s.pid())
			require.NoError(t, err)
			proc.Identify(&p)
			assert.Equal(t, root+"/server", p.Path)
			assert.Equal(t, name == "Go", p.Go.IsGo)
			assert.Equal(t, p.Go.IsGo, p.Go.Known)

			c := collect(t, ebpfllmreceiver.TargetConfig{Executable: root + "/server"})
			path := "/lock?60"
			if name == "Go" {
				path = "/flock"
				f, err := os.Create(root + "/lock")
				require.NoError(t, err)
				require.NoError(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
				defer time.AfterFunc(delayMS*time.Millisecond, func() { _ = f.Close() }).Stop()
			}
			s.ask(path, traceparent)
			path, _, _ = strings.Cut(path, "?")
			r := &c.to(path, 1)[0]
			requireLinked(t, r)
			assert.Equal(t, int64(s.pid()), r.pid())
			assert.Equal(t, "server", r.Resource["process.executable.name"])
			assert.Greater(t, r.stage(t, "lock"), tolerance*0.06, "%v", r.Attributes)
		})
	}
}

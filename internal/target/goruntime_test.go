package target

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The program reads its own g both ways, so the offset is checked against the
// truth and not against this package's idea of it.
func TestGoRuntimeFindsG(t *testing.T) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		t.Skip("g is found by offset on linux/amd64 only")
	}
	tests := []struct {
		name  string
		cgo   bool
		flags []string
		known bool
	}{
		{name: "go linker", known: true},
		{name: "go linker, stripped", flags: []string{"-ldflags=-s -w"}, known: true},
		{name: "go linker, position independent", flags: []string{"-buildmode=pie"}, known: true},
		{name: "with C", cgo: true, known: true},
		{name: "with C, position independent", cgo: true, flags: []string{"-buildmode=pie"}, known: true},
		{name: "with C, stripped", cgo: true, flags: []string{"-ldflags=-s -w"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			env := append(os.Environ(), "CGO_ENABLED=0")
			if tt.cgo {
				if _, err := exec.LookPath("gcc"); err != nil {
					t.Skip("needs gcc to link C into the program")
				}
				env = append(env, "CGO_ENABLED=1")
			}
			bin := filepath.Join(t.TempDir(), "gtls")
			build := exec.Command("go", append(append([]string{"build", "-o", bin}, tt.flags...), "./testdata/gtls")...)
			build.Env = env
			out, err := build.CombinedOutput()
			require.NoError(t, err, "%s", out)

			g := goRuntime(bin)
			assert.True(t, g.IsGo)
			require.Equal(t, tt.known, g.Known)
			if !g.Known {
				return
			}
			out, err = exec.Command(bin, strconv.FormatInt(g.GOffset, 10)).CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Equal(t, "true", string(out), "offset %d", g.GOffset)
		})
	}
}

func TestGoRuntimeOfOtherFiles(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "script")
	require.NoError(t, os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755))
	broken := filepath.Join(dir, "broken")
	require.NoError(t, os.WriteFile(broken, []byte("\x7fELF\x02\x01\x01"+string(make([]byte, 57))), 0o755))
	for _, path := range []string{text, broken, dir, filepath.Join(dir, "absent"), "/bin/sh"} {
		assert.Equal(t, GoRuntime{}, goRuntime(path), path)
	}
}

func TestGoRuntimeTellsFilesOfOneNameSizeAndTimeApart(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	program, err := os.ReadFile(self)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "server")
	built := time.Unix(1, 0)
	put := func(content []byte) {
		require.NoError(t, os.WriteFile(path, content, 0o755))
		require.NoError(t, os.Chtimes(path, built, built))
	}
	put(program)
	require.True(t, goRuntime(path).IsGo)
	require.NoError(t, os.Rename(path, path+".other")) // so that its number is not given out again
	put(make([]byte, len(program)))
	assert.Equal(t, GoRuntime{}, goRuntime(path))
}

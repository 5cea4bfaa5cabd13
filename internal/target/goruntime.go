package target

import (
	"debug/elf"
	"os"
	"sync"
)

// GoRuntime says whether a program is a Go program and where its threads keep
// their current goroutine.
type GoRuntime struct {
	IsGo    bool
	GOffset int64 // of g from the thread's FS base, in bytes; x86-64 only, elsewhere g has a register
	Known   bool  // GOffset is certain; false if the symbols that tell were stripped
}

// goRuntimes remembers what executables are by what they are on disk. Images of
// containers may hold different programs of one name, size and (if they were
// built to be reproducible) time, so that it must be the same file as well.
var goRuntimes struct {
	sync.Mutex
	m map[fileID]inspected
}

type inspected struct {
	file os.FileInfo
	GoRuntime
}

type fileID struct {
	name  string
	size  int64
	mtime int64
}

const (
	maxGoRuntimes  = 1024
	maxSymbolTable = 256 << 20
)

// goRuntime looks at the ELF file at path. A file that cannot be read is taken
// for one that is not Go.
func goRuntime(path string) GoRuntime {
	f, err := os.Open(path)
	if err != nil {
		return GoRuntime{}
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return GoRuntime{}
	}
	name, err := os.Readlink(path)
	if err != nil {
		name = path
	}
	id := fileID{name, st.Size(), st.ModTime().UnixNano()}

	goRuntimes.Lock()
	defer goRuntimes.Unlock()
	if in, ok := goRuntimes.m[id]; ok && os.SameFile(in.file, st) {
		return in.GoRuntime
	}
	if goRuntimes.m == nil || len(goRuntimes.m) >= maxGoRuntimes {
		goRuntimes.m = map[fileID]inspected{}
	}
	var g GoRuntime
	if e, err := elf.NewFile(f); err == nil {
		g = inspect(e)
	}
	goRuntimes.m[id] = inspected{st, g}
	return g
}

func inspect(e *elf.File) GoRuntime {
	if e.Section(".go.buildinfo") == nil && e.Section(".note.go.buildid") == nil {
		return GoRuntime{}
	}
	if e.Machine != elf.EM_X86_64 {
		return GoRuntime{IsGo: true, Known: e.Machine == elf.EM_AARCH64} // x28 holds g
	}
	var tls *elf.ProgHeader
	for _, p := range e.Progs {
		if p.Type == elf.PT_TLS {
			tls = &p.ProgHeader
			break
		}
	}
	// Go's own linker makes g the only thread-local word, just below the FS base.
	if tls == nil || tls.Memsz == 8 {
		return GoRuntime{IsGo: true, GOffset: -8, Known: true}
	}
	// With C in the program the thread-local block holds more, and the symbol
	// runtime.tlsg says where in it g is. The block ends at the FS base; its
	// length is padded so that its start keeps the segment's alignment (variant
	// II of the ELF thread-local storage layout).
	if table := e.SectionByType(elf.SHT_SYMTAB); table == nil || table.Size > maxSymbolTable {
		return GoRuntime{IsGo: true}
	}
	symbols, err := e.Symbols()
	if err != nil {
		return GoRuntime{IsGo: true}
	}
	for _, s := range symbols {
		if s.Name != "runtime.tlsg" || elf.ST_TYPE(s.Info) != elf.STT_TLS || s.Value+8 > tls.Memsz {
			continue
		}
		size := tls.Memsz
		if a := tls.Align; a > 1 {
			size += -(tls.Vaddr + size) & (a - 1)
		}
		return GoRuntime{IsGo: true, GOffset: int64(s.Value) - int64(size), Known: true}
	}
	return GoRuntime{IsGo: true}
}

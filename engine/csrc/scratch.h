// Memory of one call, kept by the thread for the next: after the largest call nothing is allocated any more.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace adapt {

class Scratch {
  public:
    // What is taken from a scope is free again when it ends. Scopes nest.
    class Scope {
      public:
        Scope() : scratch_(own()), block_(scratch_.block_), used_(scratch_.used_) { ++scratch_.depth_; }
        ~Scope() {
            scratch_.block_ = block_;
            scratch_.used_ = used_;
            if (--scratch_.depth_ == 0) scratch_.settle();
        }
        Scope(const Scope &) = delete;

        template <class T>
        T *take(std::size_t count) {
            return static_cast<T *>(scratch_.bytes(count * sizeof(T)));
        }

      private:
        Scratch &scratch_;
        std::size_t block_, used_;
    };

  private:
    struct Block {
        char *data;
        std::size_t size;
    };
    static constexpr std::size_t line = 64;

    static Scratch &own() {
        static thread_local Scratch scratch;
        return scratch;
    }
    ~Scratch() { clear(); }

    void *bytes(std::size_t size) {
        size = (size + line - 1) / line * line + line;  // a line apart: neighbours belong to different threads
        while (block_ < blocks_.size() && used_ + size > blocks_[block_].size) {
            ++block_;
            used_ = 0;
        }
        if (block_ == blocks_.size()) add(size);
        void *found = blocks_[block_].data + used_;
        used_ += size;
        return found;
    }
    void add(std::size_t size) {
        size = (size + 4095) / 4096 * 4096;
        char *data = static_cast<char *>(std::aligned_alloc(line, size));
        if (data == nullptr) throw std::bad_alloc();
        blocks_.push_back({data, size});
    }
    void clear() {
        for (const Block &block : blocks_) std::free(block.data);
        blocks_.clear();
    }
    // One block instead of several, for the next call.
    void settle() {
        if (blocks_.size() < 2) return;
        std::size_t total = 0;
        for (const Block &block : blocks_) total += block.size;
        clear();
        add(total);
    }

    std::vector<Block> blocks_;
    std::size_t block_ = 0, used_ = 0;
    int depth_ = 0;
};

}  // namespace adapt
